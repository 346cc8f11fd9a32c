"""Serve requests of two models in one process, on a budget that cannot hold both: they sleep and wake in turn.

    python examples/sleeping_models/serve.py                      # tiny, on CPU torch and the host driver
    python examples/sleeping_models/serve.py --billion            # on a GPU: a billion parameters each

Each model's weights, caches and graphs are pools of its own. When the other one has waited long enough, they go to
sleep: weights and the caches of unfinished sequences are kept in host memory. Everything is then done again with plain
tensors and memory enough, and every token compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import LIKELIEST, PAGE, Decoder, ElasticCache, PlainCache, Shape, sample

import remap
from remap import MiB

SLOTS = 16
"""How many sequences a step takes at most."""

LONGEST_PROMPT = 8
"""How many tokens a prompt has at most."""


@dataclass
class Request:
    """One request: a prompt, how many tokens it asks for, and what it has got."""

    number: int
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def length(self) -> int:
        """How many tokens it will have in the end."""
        return len(self.prompt) + self.wanted


def requests(count: int, shape: Shape, seed: int) -> list[Request]:
    """Return requests with a long tail: half want under a twentieth of the longest, one in fifty nearly all of it."""
    chance = random.Random(seed)
    made: list[Request] = []
    for number in range(count):
        prompt = [chance.randrange(shape.vocabulary) for _ in range(chance.randint(2, LONGEST_PROMPT))]
        wanted = int(chance.lognormvariate(0, 1.2) * shape.longest / 20) + 1
        made.append(Request(number, prompt, min(wanted, shape.longest - len(prompt))))
    return made


class Rows:
    """Which rows of the caches are whose, in pages. Page 0 belongs to the slots that are idle."""

    def __init__(self, most: int) -> None:
        self.most = most // PAGE
        self.used = 1
        self._free: list[int] = []

    @property
    def rows(self) -> int:
        """How many rows there have to be."""
        return self.used * PAGE

    def left(self) -> int:
        """Return how many pages can still be given out."""
        return self.most - self.used + len(self._free)

    def take(self, request: Request) -> None:
        """Give a request one more page."""
        self._free.sort(reverse=True)
        page = self._free.pop() if self._free else self.used
        self.used = max(self.used, page + 1)
        request.rows += range(page * PAGE, (page + 1) * PAGE)

    def give(self, request: Request) -> None:
        """Take a request's pages back; free ones at the end are no rows any more."""
        self._free += [row // PAGE for row in request.rows[::PAGE]]
        request.rows.clear()
        while self.used > 1 and self.used - 1 in self._free:
            self.used -= 1
            self._free.remove(self.used)


class Service:
    """One model, its caches, its captured steps, and the requests that it serves."""

    def __init__(
        self, name: str, shape: Shape, given: list[Request], most: int, options: Options, elastic: bool
    ) -> None:
        self.name, self.shape, self.options, self.elastic = name, shape, options, elastic
        self.waiting, self.active, self.finished = given, list[Request](), list[Request]()
        self.chance = torch.Generator().manual_seed(sum(map(ord, name)))
        self.pages = Rows(most)
        self.graphs: dict[int, tuple[list[Any], torch.Tensor]] = {}
        self.memory = (
            torch.cuda.graph_pool_handle() if options.device.type == "cuda" else None
        )  # where not elastic
        self.most_at_once = self.steps = 0
        dtype, device = options.dtype, options.device
        with torch.device("meta"):
            self.model = Decoder(shape).to(dtype)
        with self._pool("weights"):
            for module in self.model.modules():
                for owned in (module._parameters, module._buffers):
                    for key in [key for key, value in owned.items() if value is not None]:
                        owned[key] = self._made(owned[key])
        self.model.initialize(sum(map(ord, name)))
        with self._pool("cache"):
            self.cache = (
                ElasticCache(shape, most, dtype, options.ahead)
                if elastic
                else PlainCache(shape, most, dtype, device)
            )
        self.tokens, self.places = (torch.zeros(SLOTS, dtype=torch.long, device=device) for _ in range(2))
        self.tables: dict[int, torch.Tensor] = {}
        self.cache.grow(self.pages.rows)

    @property
    def pools(self) -> list[str]:
        """The names of its pools."""
        known = [f"{self.name} {part}" for part in ("weights", "cache", "graphs")]
        return [one for one in known if one in remap.groups() or one in remap.torch.pools()]

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.active)

    def sleep(self) -> Any:
        """Put everything to sleep: weights are kept, and caches if a sequence is unfinished."""
        kept: dict[str, Any] = {"weights": "host", "cache": "host" if self.active else None, "graphs": None}
        return remap.torch.sleep({pool: kept[pool.rsplit(" ", 1)[1]] for pool in self.pools})

    def wake(self) -> Any:
        """Wake everything; weights arrive in the order in which a step needs them, and the rest wakes beside that."""
        weights = f"{self.name} weights"
        arriving = remap.torch.wake(weights, order=self.model.parts, events=True, keep_host=True)
        try:
            remap.torch.wake([pool for pool in self.pools if pool != weights], keep_host=True)
        except BaseException:
            arriving.wait()
            raise
        return arriving

    @torch.no_grad()
    def step(self, ready: Any = None) -> int:
        """Take one token of each active sequence further; return how many were generated."""
        self._admit()
        longest = max(request.done for request in self.active) + 1
        width = max(PAGE, 1 << (longest - 1).bit_length())
        for request in self.active:
            if request.done == len(request.rows):
                self.pages.take(request)
        self.cache.grow(self.pages.rows)
        table = self.tables.setdefault(
            width, torch.zeros(SLOTS, width, dtype=torch.long, device=self.options.device)
        )
        rows = torch.zeros(SLOTS, width, dtype=torch.long)
        tokens, places = torch.zeros(SLOTS, dtype=torch.long), torch.zeros(SLOTS, dtype=torch.long)
        for slot, request in enumerate(self.active):
            sequence = request.prompt + request.tokens
            tokens[slot], places[slot] = sequence[request.done], request.done
            rows[slot, : len(request.rows)] = torch.tensor(request.rows)[:width]
            request.done += 1
        self.tokens.copy_(tokens)
        self.places.copy_(places)
        table.copy_(rows)
        logits = self._run(width, table, ready).float().cpu()
        generated = 0
        for slot, request in enumerate(list(self.active)):
            if request.done >= len(request.prompt):
                request.tokens.append(sample(logits[slot], 0.8, self.chance))
                generated += 1
            if len(request.tokens) == request.wanted:
                self.active.remove(request)
                self.finished.append(request)
                self.pages.give(request)
        self.steps += 1
        return generated

    def _admit(self) -> None:
        """Let requests in while there are slots, and pages for as much as their whole length."""
        promised = sum(-(-one.length // PAGE) - len(one.rows) // PAGE for one in self.active)
        while self.waiting and len(self.active) < SLOTS:
            needed = -(-self.waiting[0].length // PAGE)
            if promised + needed > self.pages.left():
                break
            promised += needed
            self.active.append(self.waiting.pop(0))
        self.most_at_once = max(self.most_at_once, len(self.active))

    def _run(self, width: int, table: torch.Tensor, ready: Any) -> torch.Tensor:
        """Run a step, part by part, as graphs where they have been captured; `ready(module)` comes before each part."""
        inputs = (self.tokens, self.places, table, self.cache.tensors)
        if self.options.device.type != "cuda" or (ready is not None and width not in self.graphs):
            return self.model(*inputs, around=_after(ready))
        if width not in self.graphs:
            self.model(*inputs)  # kernels are loaded before a capture, not in it
            parts: list[tuple[tuple[torch.nn.Module, ...], torch.cuda.CUDAGraph]] = []
            logits = self.model(*inputs, around=partial(self._captured, parts))
            self.graphs[width] = parts, logits
        parts, logits = self.graphs[width]
        for modules, graph in parts:
            for module in modules if ready is not None else ():
                ready(module)
            graph.replay()
        return logits

    @contextmanager
    def _captured(self, parts: list[Any], *modules: torch.nn.Module) -> Iterator[None]:
        """Capture a part of a step. A graph for each: the first ones can run while weights of later ones arrive."""
        graph = torch.cuda.CUDAGraph()
        into = (
            remap.torch.graph(graph, f"{self.name} graphs")
            if self.elastic
            else torch.cuda.graph(graph, self.memory)
        )
        with into:
            yield
        parts.append((modules, graph))

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a weight, or a buffer, of this shape."""
        if self.elastic:  # on a GPU torch.empty would do as well; CPU torch has to be told
            made = remap.torch.empty(tuple(like.shape), dtype=like.dtype)
        else:
            made = torch.empty(like.shape, dtype=like.dtype, device=self.options.device)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(like, torch.nn.Parameter) else made

    def _pool(self, part: str) -> Any:
        return remap.torch.pool(f"{self.name} {part}") if self.elastic else nullcontext()

    def close(self) -> None:
        """Let go of everything."""
        self.graphs.clear()
        if self.elastic:
            self.cache.close()


def _after(ready: Any) -> Any:
    """Return what calls `ready` for the modules of a part, and then lets it be worked out."""

    @contextmanager
    def around(*modules: torch.nn.Module) -> Iterator[None]:
        for module in modules if ready is not None else ():
            ready(module)
        yield

    return around


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    device: torch.device
    dtype: torch.dtype
    ahead: int
    quantum: int
    count: int
    live: bool


@dataclass
class Switch:
    """One change from a model to the other: from asking for the wake to the first token, and what was copied."""

    seconds_to_first_token: float
    asleep_bytes: int
    asleep_rate: float
    awake_bytes: int
    awake_rate: float


@dataclass
class Served:
    """What serving took: the switches, the seconds of all and of each step, and the tokens that came of it."""

    switches: list[Switch] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    generated: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.generated / self.seconds


def serve(services: list[Service], elastic: bool, quantum: int, show: Any) -> Served:
    """Serve all requests, a quantum of steps for each model in turn.

    The first model is awake, and with `elastic` the others sleep.
    """
    served, turn, start = Served(), 0, time.perf_counter()
    while any(one.busy for one in services):
        awake, slept, arriving = services[turn % len(services)], None, None
        if turn and elastic:
            slept = services[(turn - 1) % len(services)].sleep()
        began = time.perf_counter()
        if slept is not None:
            arriving = awake.wake()
        for number in range(quantum if awake.busy else 0):
            if not awake.busy:
                break
            # In the first step each layer waits for its own weights; plain tensors take the same steps.
            ready = None if number else arriving.wait_for if arriving is not None else lambda _module: None
            asked = time.perf_counter()
            served.generated += awake.step(ready)
            served.steps.append(time.perf_counter() - asked)
            if number == 0 and arriving is not None and slept is not None:
                first, moved = time.perf_counter() - began, arriving.wait()
                served.switches.append(Switch(first, slept.bytes, slept.rate, moved.bytes, moved.rate))
                arriving = None
            show(services, awake, served)
        if arriving is not None:
            arriving.wait()
        turn += 1
    served.seconds = time.perf_counter() - start
    return served


class Budget:
    """The memory that the models' weights and caches may use together: too little for both. What they use is measured.

    On a GPU, where others may want the rest, it is not enforced, and graphs and libraries have memory of their own.
    """

    def __init__(self, size: int, services: list[Service]) -> None:
        self.size = size
        self.most = 0
        self._pools = [f"{one.name} {part}" for one in services for part in ("weights", "cache")]

    def look(self) -> None:
        """Note what stands behind weights and caches now."""
        state = remap.torch.status()
        self.most = max(self.most, sum(state[pool].resident for pool in self._pools if pool in state))

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Hold all other memory of the device, so that there is no more."""
        free = remap.device(0).memory().free
        with remap.allocate(max(free - self.size, 0) // (2 * MiB) * (2 * MiB), resident=0):
            yield


@contextmanager
def shown(live: bool) -> Iterator[Any]:
    """Yield what shows the state of things on the terminal, if it is asked to."""
    if not live:
        yield lambda *_: None
        return
    from rich.live import Live
    from rich.table import Table

    with Live(refresh_per_second=8) as display:

        def show(services: list[Service], awake: Service, served: Served) -> None:
            table = Table(title=f"{served.generated} tokens, {len(served.switches)} switches")
            for column in ("model", "state", "waiting", "active", "finished", "cache rows", "backed"):
                table.add_column(column)
            state = remap.torch.status()
            for one in services:
                backed = sum(state[pool].resident for pool in one.pools if pool in state)
                table.add_row(
                    one.name, "awake" if one is awake else "asleep", str(len(one.waiting)), str(len(one.active)),
                    str(len(one.finished)), str(one.pages.rows), f"{backed / MiB:.0f} MiB",
                )  # fmt: skip
            display.update(table)

        yield show


def run(shape: Shape, most: int, options: Options, elastic: bool) -> dict[str, Any]:
    """Serve everything once; return the tokens by model and request, and the figures."""
    services: list[Service] = []
    for name in ("one", "two"):
        services.append(
            Service(name, shape, requests(options.count, shape, sum(map(ord, name))), most, options, elastic)
        )
        if elastic:
            services[-1].sleep()
    weights = sum(weight.nbytes for weight in services[0].model.parameters())
    caches = most * sum(tensor[0].nbytes for tensor in services[0].cache.tensors)
    backed = remap.torch.status()[f"{services[0].name} weights"].size if elastic else weights
    room = backed + caches + max((backed + caches) // 4, 16 * MiB)
    assert not elastic or room < 2 * backed, "the budget holds one model, and not both"
    budget = Budget(room, services)
    enforced = elastic and remap.driver().name == "host"
    with budget.enforced() if enforced else nullcontext(), shown(options.live and elastic) as show:
        if elastic:
            remap.torch.wake(services[0].pools)

        def looked(*state: Any) -> None:
            budget.look()
            show(*state)

        served = serve(services, elastic, options.quantum, looked)
    found = {
        "tokens": {one.name: {done.number: done.tokens for done in one.finished} for one in services},
        "served": served,
        "at once": max(one.most_at_once for one in services),
        "at once, static caches": max(most // shape.longest, 1),
        "weights": weights,
        "caches": caches,
        "budget": budget.size,
        "most in use": budget.most,
    }
    for one in services:
        one.close()
    return found


def report(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return what is worth telling of both runs."""
    served: Served = found["served"]
    moved = [one for one in served.switches if one.awake_bytes]
    middle = sorted(moved, key=lambda one: one.seconds_to_first_token)[len(moved) // 2] if moved else None
    return {
        "bytes of a model's weights": found["weights"],
        "bytes of a model's caches, at most": found["caches"],
        "budget, bytes": found["budget"],
        "most in use, bytes": found["most in use"],
        "switches": len(served.switches),
        "the median switch": asdict(middle) if middle else None,
        "the median step with plain tensors, seconds": statistics.median(plain["served"].steps),
        "tokens": served.generated,
        "tokens a second": served.rate,
        "tokens a second, plain tensors and memory for both": plain["served"].rate,
        "sequences at once": found["at once"],
        "sequences at once, static caches in the same memory": found["at once, static caches"],
        "every token as with plain tensors": found["tokens"] == plain["tokens"],
    }


BILLION = Shape(layers=22, width=2048, heads=32, kv_heads=4, inner=5632, vocabulary=32_000, longest=4096)
"""1.03 billion parameters."""


def positive(text: str) -> int:
    """Return an option's number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it is 1 or more")
    return number


def problem(shape: Shape, static: int, report: Path | None) -> str:
    """Return what is wrong with options that are fine one by one, "" where nothing is."""
    pages = -(-shape.longest // PAGE) + 1  # one belongs to the slots that are idle
    if shape.width % (2 * shape.heads):
        return f"--width {shape.width}: it is an even number for each of {shape.heads} heads"
    if shape.heads % shape.kv_heads:
        return f"--kv-heads {shape.kv_heads}: they divide the {shape.heads} heads"
    if shape.vocabulary < LIKELIEST:
        return f"--vocabulary {shape.vocabulary}: a token is chosen among {LIKELIEST}"
    if shape.longest <= LONGEST_PROMPT:
        return f"--longest {shape.longest}: a prompt has up to {LONGEST_PROMPT} tokens, and one is to follow"
    if static * shape.longest < pages * PAGE:
        return f"--static {static}: there are to be {pages} pages of {PAGE}, for {shape.longest} tokens and one idle"
    if report is not None and not report.absolute().parent.is_dir():
        return f"--report {report}: there is no such directory"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run, report, and return 0 if every token was right and the budget was kept."""
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=whole)
    parser.add_argument("--billion", action="store_true", help="a billion parameters each (on a GPU)")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"{value} by default")
    parser.add_argument("--requests", type=positive, default=24, help="for each model")
    parser.add_argument("--quantum", type=positive, default=32, help="steps until the other model's turn")
    parser.add_argument(
        "--static", type=positive, default=4, help="sequences of static caches in that memory"
    )
    parser.add_argument("--live", action="store_true", help="show what happens")
    parser.add_argument("--report", type=Path, help="write the report there, as JSON")
    told = parser.parse_args(arguments)
    chosen = {name: getattr(told, name) for name in asdict(Shape()) if getattr(told, name) is not None}
    shape = replace(BILLION if told.billion else Shape(), **chosen)
    wrong = problem(shape, told.static, told.report)
    if wrong:
        parser.error(wrong)
    if remap.driver().name != "cuda":
        remap.use("host", memory=512 * MiB, devices=1, coherent=True, integrated=False)
        torch.set_num_threads(1)  # on so small a model others would only wait for their turn
    on_gpu = remap.driver().name == "cuda"
    options = Options(
        device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        ahead=2 * MiB if on_gpu else 0,
        quantum=told.quantum,
        count=told.requests,
        live=told.live,
    )
    most = told.static * shape.longest
    found = run(shape, most, options, elastic=True)
    gc.collect()
    remap.collect()
    plain = run(shape, most, options, elastic=False)
    figures = {"driver": remap.driver().name, "shape": asdict(shape), **report(found, plain)}
    text = json.dumps(figures, indent=2)
    print(text)
    if told.report:
        told.report.write_text(text + "\n")
    within = found["most in use"] <= found["budget"]
    return 0 if figures["every token as with plain tensors"] and within else 1


if __name__ == "__main__":
    raise SystemExit(main())
