"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id);
const picture = get("picture"), pen = picture.getContext("2d"), tip = get("tip");
const ROW = 38, BAR = 14, LEFT = 10, PLACE = 34, MOST_ROWS = 500, MOST_LINES = 400, MOST_HEIGHT = 6000, ROOM = 90;

function size(bytes) {
  if (bytes === null || bytes === undefined) return "not asked";
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]])
    if (bytes >= unit) return (bytes % unit ? (bytes / unit).toFixed(2) : bytes / unit) + " " + name;
  return bytes + " B";
}
const hex = (lane, offset) => "0x" + (BigInt(lane.address) + BigInt(offset)).toString(16);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What the page looks at: the lanes that the search leaves, which one is chosen, and which part of each is seen.
const state = { lanes: data.lanes, top: 0, from: 0, to: 1, lane: -1, piece: -1, shown: MOST_ROWS, items: data.items };

// Physical memory: each location a strip, each allocation in it once.
const blocks = new Map(), places = data.places.map(place => ({ ...place, bytes: 0 }));
function block(memory, bytes, place) {
  if (!blocks.has(memory)) { blocks.set(memory, { place, start: places[place].bytes, bytes }); places[place].bytes += bytes; }
}
for (const lane of data.lanes) for (const [, bytes, place, memory] of lane.pieces) block(memory, bytes, place);
for (const [bytes, place, memory] of data.loose) block(memory, bytes, place);
const strips = places.filter(place => place.bytes);
strips.forEach((place, index) => { place.row = index; });

let width = 0, height = 0;
const lanesHeight = () => height - strips.length * PLACE - 14;
function resize() {
  const ratio = window.devicePixelRatio || 1;
  width = picture.clientWidth;
  // As high as everything needs, up to a part of the window; a finger cannot scroll inside, so there it is all shown.
  const most = matchMedia("(pointer: coarse)").matches ? MOST_HEIGHT : window.innerHeight * 0.6;
  const wanted = data.lanes.length * ROW + ROOM + strips.length * PLACE + 14;
  height = Math.max(260, Math.round(Math.min(most, wanted)));
  picture.style.height = height + "px";
  picture.width = width * ratio; picture.height = height * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw();
}

const inner = () => width - 2 * LEFT;
const x = share => LEFT + (share - state.from) / (state.to - state.from) * inner();
function pieceBox(lane, index, row) {
  const [offset, bytes] = lane.pieces[index];
  const start = Math.max(x(offset / lane.drawn), LEFT), end = Math.min(x((offset + bytes) / lane.drawn), LEFT + inner());
  return { x: start, y: row * ROW - state.top + 18, w: Math.max(end - start, 1), seen: end >= LEFT && start <= LEFT + inner() };
}
function blockBox(memory) {
  const one = blocks.get(memory), place = places[one.place];
  const y = lanesHeight() + 14 + place.row * PLACE + 14;
  return { x: LEFT + one.start / place.bytes * inner(), y, w: Math.max(one.bytes / place.bytes * inner(), 1) };
}
function firstSeen(lane) {
  let low = 0, high = lane.pieces.length;
  const edge = state.from * lane.drawn;
  while (low < high) { const middle = (low + high) >> 1; const [offset, bytes] = lane.pieces[middle]; if (offset + bytes < edge) low = middle + 1; else high = middle; }
  return low;
}
function paint(box, place, right, h) {
  pen.fillStyle = places[place].colour;
  pen.fillRect(box.x, box.y, box.w, h);
  if (right !== "rw" && box.w > 2) {
    pen.fillStyle = css("--veil");
    const step = right === "r" ? 6 : 3;
    for (let at = box.x; at < box.x + box.w; at += step) pen.fillRect(at, box.y, Math.min(step / 2, box.x + box.w - at), h);
  }
}
// The bytes of a paused buffer: an outline, as its memory is elsewhere.
function sleeping(lane, y, colour) {
  const end = Math.min(x(lane.asleep / lane.drawn), LEFT + inner()), start = Math.max(x(0), LEFT);
  if (!lane.asleep || end <= start) return;
  pen.save(); pen.strokeStyle = colour; pen.setLineDash([3, 3]); pen.strokeRect(start + .5, y + .5, end - start - 1, BAR - 1);
  pen.fillStyle = colour; pen.fillText("z", start + 4, y + 11); pen.restore();
}
function fitting(text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(text.slice(0, length) + "…").width > room) length--;
  return text.slice(0, length) + "…";
}
function draw() {
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  const bottom = lanesHeight(), text = css("--text"), dim = css("--dim"), bar = css("--bar"), mark = css("--mark"), line = css("--line");
  pen.save(); pen.beginPath(); pen.rect(0, 0, width, bottom); pen.clip();
  const first = Math.floor(state.top / ROW), last = Math.min(state.lanes.length, Math.ceil((state.top + bottom) / ROW));
  const seen = [];
  for (let row = first; row < last; row++) {
    const lane = state.lanes[row], y = row * ROW - state.top;
    pen.fillStyle = row === state.lane ? mark : text;
    const where = size(lane.size) + " at " + hex(lane, 0) + (lane.drawn < lane.size ? ", the first " + size(lane.drawn) + " drawn" : "");
    pen.fillText(fitting(lane.title + (lane.state ? "  (" + lane.state + ")" : ""), inner() - pen.measureText(where).width - 12), LEFT, y + 13);
    pen.fillStyle = dim; pen.textAlign = "right";
    pen.fillText(where, LEFT + inner(), y + 13);
    pen.textAlign = "left";
    pen.fillStyle = bar; pen.fillRect(LEFT, y + 18, inner(), BAR);
    sleeping(lane, y + 18, dim);
    let covered = -1;
    for (let index = firstSeen(lane); index < lane.pieces.length; index++) {
      const box = pieceBox(lane, index, row);
      if (box.x > LEFT + inner()) break;
      if (!box.seen || box.x + box.w <= covered) continue;
      paint(box, lane.pieces[index][2], lane.pieces[index][4], BAR);
      covered = Math.floor(box.x + box.w);
      if (box.w > 5) { pen.strokeStyle = css("--back"); pen.lineWidth = 1; pen.strokeRect(box.x + .5, box.y + .5, box.w - 1, BAR - 1); }
      if (seen.length < MOST_LINES) seen.push([lane, index, row]);
    }
    if (row === state.lane) { pen.strokeStyle = mark; pen.lineWidth = 1.5; pen.strokeRect(LEFT - 1, y + 17, inner() + 2, BAR + 2); }
  }
  if (!state.lanes.length) { pen.fillStyle = dim; pen.fillText("Nothing here" + (get("search").value ? " that the search finds." : "."), LEFT, 20); }
  pen.restore();
  pen.strokeStyle = line; pen.beginPath(); pen.moveTo(0, bottom + 6); pen.lineTo(width, bottom + 6); pen.stroke();
  for (const place of strips) {
    const y = bottom + 14 + place.row * PLACE;
    pen.fillStyle = text; pen.fillText(place.name + ": " + size(place.bytes) + " of physical memory", LEFT, y + 10);
    pen.fillStyle = bar; pen.fillRect(LEFT, y + 14, inner(), BAR);
  }
  const covered = {};
  for (const [memory, one] of blocks) {
    const box = blockBox(memory);
    if (box.x + box.w <= (covered[one.place] ?? -1)) continue;
    paint(box, one.place, "rw", BAR); covered[one.place] = Math.floor(box.x + box.w);
    if (box.w > 5) { pen.strokeStyle = css("--back"); pen.lineWidth = 1; pen.strokeRect(box.x + .5, box.y + .5, box.w - 1, BAR - 1); }
  }
  // Lines for everything in sight, unless that is too much; for the chosen one always, with its aliases.
  if (seen.length < MOST_LINES) for (const [lane, index, row] of seen) join(lane, index, row, dim, .45, 1);
  const lane = state.lanes[state.lane];
  if (lane && state.piece >= 0) {
    const memory = lane.pieces[state.piece][3];
    for (let row = first; row < last; row++) state.lanes[row].pieces.forEach((piece, index) => { if (piece[3] === memory) join(state.lanes[row], index, row, mark, 1, 2); });
  }
}
function join(lane, index, row, colour, alpha, thick) {
  const from = pieceBox(lane, index, row), to = blockBox(lane.pieces[index][3]);
  if (!from.seen || from.y + BAR > lanesHeight()) return;
  pen.globalAlpha = alpha; pen.strokeStyle = colour; pen.lineWidth = thick; pen.beginPath();
  const x1 = from.x + from.w / 2, x2 = to.x + to.w / 2, y1 = from.y + BAR, middle = (y1 + to.y) / 2;
  pen.moveTo(x1, y1); pen.bezierCurveTo(x1, middle, x2, middle, x2, to.y); pen.stroke(); pen.globalAlpha = 1;
}

function told(lane, index) {
  if (index < 0) return lane.title + "\n" + hex(lane, 0) + ", " + size(lane.size) + ", " + size(lane.backed) + " mapped" + (lane.state ? "\n" + lane.state : "") + (lane.site ? "\nmade at " + lane.site : "");
  const [offset, bytes, place, memory, , item] = lane.pieces[index];
  const aliases = data.aliases[memory] || 1;
  return data.items[item].title + "\n" + hex(lane, offset) + ", " + size(bytes) + " on " + places[place].name + (aliases > 1 ? ", mapped at " + aliases + " addresses" : "")
    + "\nrights: " + (data.rights[lane.pieces[index][6]] || "no access") + (data.items[item].site ? "\nmade at " + data.items[item].site : "");
}
function find(px, py) {
  if (py >= lanesHeight()) return null;
  const row = Math.floor((py + state.top) / ROW), lane = state.lanes[row];
  if (!lane) return null;
  for (let index = firstSeen(lane); index < lane.pieces.length; index++) {
    const box = pieceBox(lane, index, row);
    if (box.x > px) break;
    if (px <= box.x + box.w && py >= box.y && py <= box.y + BAR) return [row, index];
  }
  return [row, -1];
}
function choose(row, index) {
  state.lane = Math.max(-1, Math.min(row, state.lanes.length - 1));
  const lane = state.lanes[state.lane];
  state.piece = lane ? Math.max(-1, Math.min(index, lane.pieces.length - 1)) : -1;
  if (lane) {
    const y = state.lane * ROW;
    if (y < state.top) state.top = y;
    if (y + ROW > state.top + lanesHeight()) state.top = y + ROW - lanesHeight();
  }
  get("said").textContent = lane ? told(lane, state.piece) : "";
  draw();
}
function scroll(by) { state.top = Math.max(0, Math.min(state.top + by, state.lanes.length * ROW - lanesHeight() + 10)); if (state.top < 0) state.top = 0; draw(); }
function zoom(factor, at) {
  const span = Math.min(1, Math.max((state.to - state.from) * factor, 1e-9)), fix = state.from + (state.to - state.from) * at;
  state.from = Math.min(Math.max(fix - span * at, 0), 1 - span); state.to = state.from + span; draw();
}
function move(by) { const span = state.to - state.from; state.from = Math.min(Math.max(state.from + by * span, 0), 1 - span); state.to = state.from + span; draw(); }

picture.addEventListener("mousemove", event => {
  const found = find(event.offsetX, event.offsetY);
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = told(state.lanes[found[0]], found[1]);
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
});
picture.addEventListener("mouseleave", () => { tip.hidden = true; });
picture.addEventListener("click", event => { const found = find(event.offsetX, event.offsetY); if (found) choose(...found); });
picture.addEventListener("wheel", event => {
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : .8, Math.min(Math.max((event.offsetX - LEFT) / inner(), 0), 1));
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / width);
  else scroll(event.deltaY);
}, { passive: false });
picture.addEventListener("keydown", event => {
  const keys = { ArrowDown: () => choose(state.lane + 1, -1), ArrowUp: () => choose(Math.max(state.lane - 1, 0), -1), ArrowLeft: () => move(-.2), ArrowRight: () => move(.2),
    "]": () => choose(Math.max(state.lane, 0), state.piece + 1), "[": () => choose(Math.max(state.lane, 0), Math.max(state.piece - 1, 0)),
    "+": () => zoom(.5, .5), "=": () => zoom(.5, .5), "-": () => zoom(2, .5), 0: () => { state.from = 0; state.to = 1; draw(); },
    PageDown: () => scroll(lanesHeight()), PageUp: () => scroll(-lanesHeight()), Home: () => choose(0, -1), End: () => choose(state.lanes.length - 1, -1) };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); keys[event.key](); }
});

function matches(text, words) { return words.every(word => text.includes(word)); }
function search() {
  const asked = get("search").value.trim().toLowerCase(), words = asked.split(/\s+/).filter(Boolean);
  let address = null;
  if (/^0x[0-9a-f]{1,16}$/.test(asked)) address = BigInt(asked);
  const within = (start, bytes) => address !== null && start !== null && address >= BigInt(start) && address < BigInt(start) + BigInt(bytes);
  state.items = data.items.filter(item => matches(item.text, words) || within(item.address, Math.max(item.size, 1)));
  const kept = new Set(state.items.map(item => item.index));
  state.lanes = data.lanes.filter(lane => kept.has(lane.owner) || within(lane.address, lane.size) || lane.pieces.some(piece => kept.has(piece[5])));
  state.top = 0; state.shown = MOST_ROWS;
  choose(state.lanes.length && asked ? 0 : -1, -1);
  rows();
}
function cell(row, text, kind) {
  const made = document.createElement("td");
  if (kind === "code") { const code = document.createElement("code"); code.textContent = text; made.append(code); } else made.textContent = text;
  if (kind === "number") made.className = "number";
  row.append(made);
}
function rows() {
  const body = get("rows"), all = document.createDocumentFragment();
  for (const item of state.items.slice(0, state.shown)) {
    const row = document.createElement("tr");
    cell(row, item.title); cell(row, size(item.size), "number"); cell(row, item.address === null ? "" : "0x" + BigInt(item.address).toString(16), "code");
    cell(row, item.memory); cell(row, item.rights); cell(row, item.state); cell(row, item.site);
    all.append(row);
  }
  body.replaceChildren(all);
  const count = state.items.length, shown = Math.min(count, state.shown);
  get("count").textContent = shown === count ? count + (count === 1 ? " object" : " objects") : "the first " + shown + " of " + count + " objects";
  get("more").hidden = shown === count;
}

get("search").addEventListener("input", search);
get("more").addEventListener("click", () => { state.shown += MOST_ROWS; rows(); });
get("view").addEventListener("click", () => {
  const table = get("list").hidden;
  get("list").hidden = !table; get("map").hidden = table;
  get("view").textContent = table ? "Map" : "Table"; get("view").setAttribute("aria-pressed", String(table));
  if (!table) resize();
});
get("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark"; draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("resize", resize);

get("about").textContent = data.about;
picture.setAttribute("aria-label", data.about + " The table shows the same as text.");
for (const place of places) {
  const entry = document.createElement("span"), swatch = document.createElement("span");
  swatch.className = "swatch"; swatch.style.background = place.colour;
  entry.append(swatch, place.name); get("legend").append(entry);
}
const patterns = document.createElement("span");
patterns.textContent = "plain: may be written; wide stripes: read only; narrow stripes: no access; empty: nothing behind the addresses; dashed: asleep, kept elsewhere. Each bar has a scale of its own, from the first address to the last, or as far as it says.";
get("legend").append(patterns);
for (const total of data.totals) {
  const row = document.createElement("tr");
  cell(row, total.name);
  for (const name of ["mapped", "aliases", "unmapped", "pools", "graphs", "footprint", "used", "total"]) cell(row, total[name] === undefined ? "" : size(total[name]), "number");
  get("totals").append(row);
}
rows();
resize();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
