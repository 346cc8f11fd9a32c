"""Registers: what they list, and what happens to them meanwhile."""

from __future__ import annotations

import gc
import sys
import threading

from remap.registers import Register


class Thing:
    """Something to be listed."""


def test_listed_for_as_long_as_they_live() -> None:
    """Objects are listed once, in order, until they go, whichever way; the register keeps none of them alive."""
    register: Register[Thing] = Register()
    things = [Thing() for _ in range(3)]
    for at in (0, 1, 2, 1):
        register.add(things[at])
    assert list(register) == things
    gone = things.pop(1)
    gone.__dict__["itself"] = gone
    del gone
    gc.collect()
    assert list(register) == things
    things.clear()
    assert not list(register)
    assert not register._references


def test_others_come_and_go_while_it_is_listed() -> None:
    """What is added meanwhile is in the next list, and what goes meanwhile is left out."""
    register: Register[Thing] = Register()
    things = [Thing() for _ in range(3)]
    for thing in things:
        register.add(thing)
    seen: list[Thing] = []
    for one in register:
        seen.append(one)
        things[1:2] = [Thing()]
        register.add(things[1])
    assert seen == [things[0], things[2]]
    assert things[1] in list(register)


def test_threads_that_add_while_others_list() -> None:
    """No list fails because other threads add objects, and drop them (invariant 13)."""
    register: Register[Thing] = Register()
    kept = Thing()
    register.add(kept)
    done = threading.Event()

    def add() -> None:
        while not done.is_set():
            for thing in [Thing() for _ in range(20)]:
                register.add(thing)

    adder = threading.Thread(target=add)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adder.start()
        assert all(kept in list(register) for _ in range(5000))
    finally:
        done.set()
        adder.join()
        sys.setswitchinterval(interval)
