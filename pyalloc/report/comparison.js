// ---- what changed between two recordings, or two moments of one: figures, table, timelines on one axis ----
const GREW = PALETTE[3], SHRANK = PALETTE[0], [BEFORE, AFTER] = D.sides;
const signed = n => (n < 0 ? "-" : "+") + size(Math.abs(n));
const changed = (before, after) => before === after ? "unchanged" : signed(after - before) + (!before ? "" : after > 11 * before ? ` (${(after / before).toFixed(0)} times as much)` : ` (${(100 * (after - before) / before).toFixed(1)} %)`);
$("title").textContent = `${BEFORE.name} → ${AFTER.name}`;
$("answer").textContent = D.sentence;
for (const [name, before, after, told] of [
  [D.isOfOne ? "allocated" : "peak allocated", BEFORE.allocated, AFTER.allocated, size], ["peak reserved", BEFORE.reserved, AFTER.reserved, size],
  ["allocations", BEFORE.allocs, AFTER.allocs, n => n.toLocaleString()],
]) {
  if (before === null || after === null || (D.isOfOne && told !== size) || (D.isOfOne && name === "peak reserved")) continue;
  const d = add($("figures"), "div");
  add(d, "span", name, "soft"); add(d, "b", `${told(before)} → ${told(after)}`);
  add(d, "span", told === size ? changed(before, after) : "", "change");
}
for (const text of D.notes) add($("notes"), "li", text);
$("verdict").textContent = `${D.isOfOne ? "" : AFTER.name + " by itself: "}${D.verdict}`;
for (const text of D.leaks) add($("leaks"), "li", text);
for (const text of D.caveats) coded(add($("caveats"), "div", undefined, "caveat"), text);

const most = Object.fromEntries(Object.entries(D.tables).map(([kind, rows]) => [kind, rows.reduce((most, r) => Math.max(most, Math.abs(r[2] - r[1])), 1)]));
const mostOf = new Map(Object.entries(D.tables).flatMap(([kind, rows]) => rows.map(r => [r, most[kind]])));
tabbed({ tabs: $("tabs"), table: $("changes"), more: $("more"), tables: D.tables, columns: [
  ["change", "n", r => Math.abs(r[2] - r[1]), (cell, r) => cell.append(r[2] === r[1] ? "0" : signed(r[2] - r[1]))],
  ["before", "n wide", r => r[1], (cell, r) => cell.append(size(r[1]))],
  ["after", "n", r => r[2], (cell, r) => cell.append(size(r[2]))],
  ["blocks", "n wide", r => r[4] - r[3], (cell, r) => cell.append(r[3] || r[4] ? r[3] === r[4] ? r[4].toLocaleString() : `${r[3].toLocaleString()} → ${r[4].toLocaleString()}` : "")],
  ["what", "name", r => r[0], (cell, r) => cell.append(r[0])],
  ["", "wide", null, (cell, r) => {
    const bar = add(cell, "div", "", "bar");
    bar.style.width = 100 * Math.abs(r[2] - r[1]) / mostOf.get(r) + "%"; bar.style.background = r[2] > r[1] ? GREW : SHRANK;
    if (r[1] === r[2]) bar.remove();
  }],
] });

// A mark of the axis: 0 event of the first, 1 event of the second, 2 place.
const AXIS = D.axis;
function between(at, from, to) { // converts a place or event, in one column of the marks, to another column
  let low = 0;
  for (let high = AXIS.length - 1; low < high;) { const mid = (low + high + 1) >> 1; if (AXIS[mid][from] <= at) low = mid; else high = mid - 1; }
  const a = AXIS[low], b = AXIS[Math.min(low + 1, AXIS.length - 1)], wide = b[from] - a[from];
  return a[to] + (wide ? (b[to] - a[to]) * Math.min(1, (at - a[from]) / wide) : 0);
}
function heights(side, column, n) { // the most in each of n columns; NaN: the run is over
  const bins = D.sides[side].bins, end = D.sides[side].end, found = new Float64Array(n);
  let bin = 0, low = between(0, 2, side);
  for (let c = 0; c < n; c++) {
    const high = between((c + 1) / n, 2, side);
    while (bin + 1 < bins.length && bins[bin + 1][0] <= low) bin++;
    let best = low >= end ? NaN : 0;
    for (let i = bin; i < bins.length && (i === bin || bins[i][0] < high) && low < end; i++) best = Math.max(best, bins[i][column]);
    found[c] = best; low = high;
  }
  return found;
}
let column = 1, held = [[], []], cursor = -1; // 1: allocated, 2: reserved
function timeline() {
  const [g, width, height] = pen($("timeline")), w = Math.max(1, Math.floor(width - LEFT)), h = height - 22;
  held = [heights(0, column, w), heights(1, column, w)];
  const top = Math.max(1, ...held.map(row => row.reduce((a, b) => b > a ? b : a, 0))) * 1.05, y = v => h * (1 - v / top) + 2;
  const box = (c, low, high, fill) => { if (high > low) { g.fillStyle = fill; g.fillRect(edge(LEFT + c), y(high), edge(LEFT + c + 1) - edge(LEFT + c), y(low) - y(high)); } };
  axis(g, width, top, y);
  const idle = css("--idle"), ink = css("--ink"), soft = css("--soft");
  for (let c = 0; c < w; c++) {
    const [a, b] = [held[0][c], held[1][c]], both = D.isOfOne || isNaN(a) || isNaN(b);
    if (both) { box(c, 0, isNaN(b) ? a : b, idle); continue; }
    box(c, 0, Math.min(a, b), idle); box(c, b, a, SHRANK); box(c, a, b, GREW);
  }
  const outline = (row, color, dash) => {
    g.strokeStyle = color; g.setLineDash(dash); g.lineWidth = 1; g.beginPath();
    row.forEach((v, c) => { if (!isNaN(v)) { g.lineTo(LEFT + c, y(v)); g.lineTo(LEFT + c + 1, y(v)); } });
    g.stroke(); g.setLineDash([]);
  };
  if (!D.isOfOne) outline(held[0], soft, [2, 2]);
  outline(held[1], ink, []);
  g.fillStyle = soft; g.textAlign = "left";
  let last = -1000;
  for (const [number, place] of D.steps) {
    const x = LEFT + place * w;
    if (x - last < 76 && D.steps.length > 60) continue;
    g.fillRect(x, h + 3, 1, 6);
    if (x - last >= 76 && x < width - 50) { g.fillText("step " + number, x + 4, height - 4); last = x; }
  }
  D.sides.forEach((side, i) => { // the two moments that everything else is about
    const x = LEFT + between(side.at, i, 2) * w;
    g.strokeStyle = g.fillStyle = i ? ink : soft; g.setLineDash(i ? [] : [4, 3]);
    g.beginPath(); g.moveTo(x, 2); g.lineTo(x, h); g.stroke(); g.setLineDash([]);
    const text = `${D.isOfOne ? side.name : i ? "after" : "before"}: ${size(side.allocated)}`, isRight = x + g.measureText(text).width + 8 > width;
    g.textAlign = isRight ? "right" : "left"; g.fillText(text, x + (isRight ? -5 : 5), 14 + 13 * i);
  });
  if (cursor >= 0) { g.fillStyle = ink; g.fillRect(LEFT + cursor * w, 2, 1, h); }
}
function legendOf(entries) { for (const [name, color] of entries) { const s = add($("timeline-legend"), "span"); if (color) add(s, "i").style.background = color; s.append(name); } }
legendOf(D.isOfOne ? [["held", "var(--idle)"], [`dashed: ${BEFORE.name}`], [`solid: ${AFTER.name}`]]
  : [["in both", "var(--idle)"], [`more in ${AFTER.name} (solid line)`, GREW], [`less than in ${BEFORE.name} (dashed line)`, SHRANK]]);
function figuresAt(place) {
  const c = Math.min(held[0].length - 1, Math.floor(place * held[0].length)), step = D.steps.filter(s => s[1] <= place).pop();
  const values = held.map(row => row[c]), told = v => isNaN(v) ? "ended" : size(v);
  const phase = D.sides.map((side, i) => (side.phases.find(p => p[1] < between(place, 2, i) && between(place, 2, i) <= p[2]) || [""])[0]);
  const where = [step ? "step " + step[0] : "", phase[0] === phase[1] ? phase[1] : phase.filter(p => p).join(", then ")].filter(t => t).join(", ");
  if (D.isOfOne) return `${where ? where + ": " : ""}${told(values[1])}`;
  return `${where ? where + ": " : ""}${told(values[0])}, then ${told(values[1])}${values.some(isNaN) ? "" : ", " + changed(...values)}`;
}
const placeAt = event => { const box = $("timeline").getBoundingClientRect(); return (event.clientX - box.left - LEFT) / (box.width - LEFT); };
$("timeline").addEventListener("mousemove", event => { const p = placeAt(event); showTip(event, p < 0 || p > 1 ? "" : figuresAt(p)); });
$("timeline").addEventListener("mouseleave", event => showTip(event, ""));
function look(place) { cursor = Math.min(1, Math.max(0, place)); $("timeline-at").textContent = figuresAt(cursor); timeline(); }
$("timeline").addEventListener("click", event => look(placeAt(event)));
$("timeline").addEventListener("keydown", event => {
  const by = { ArrowLeft: -.01, ArrowRight: .01 }[event.key], end = { Home: 0, End: 1 }[event.key];
  if (by === undefined && end === undefined) return;
  look(end === undefined ? (cursor < 0 ? between(AFTER.at, 1, 2) : cursor + by) : end);
  event.preventDefault();
});
for (const [id, which] of [["allocated", 1], ["reserved", 2]]) $(id).onclick = () => {
  column = which; timeline();
  for (const other of ["allocated", "reserved"]) $(other).setAttribute("aria-pressed", other === id);
};
$("reserved").hidden = $("allocated").hidden = D.sides.some(side => side.reserved === null);

// ---- the flame graph of both: red grew, blue shrank ----
let wide = AFTER.allocated < BEFORE.allocated ? "before" : "after"; // so that what is gone is visible
const WIDTHS = { after: (before, after) => after, before: (before, after) => before, "what changed": (before, after) => Math.abs(after - before) };
const pair = item => item.before === item.after ? `${size(item.after)}, as before` : `${size(item.before)}, then ${size(item.after)}`;
const LOOK = {
  isTwo: true,
  width: (before, after) => WIDTHS[wide](before, after),
  color: item => {
    const change = (item.after - item.before) / Math.max(1, item.before, item.after);
    if (Math.abs(change) < .005) return css("--idle");
    return (change > 0 ? GREW : SHRANK) + Math.round(50 + 150 * Math.min(1, Math.abs(change))).toString(16);
  },
  told: item => item.name === "all" ? pair(item) : item.before === item.after ? size(item.after) : signed(item.after - item.before),
  tip: item => `${pair(item)}${item.before === item.after ? "" : `: ${changed(item.before, item.after)}`}\n${nBlocks(item.blocksBefore)}, then ${nBlocks(item.blocks)}`,
};
const flameRows = () => D.flame.map(([before, nBefore, after, n, stack]) => [0, 0, after, n, stack, 0, 0, before, nBefore]);
const flameTitle = () => `Flame graph of ${D.isOfOne ? "both moments" : "both peaks"}`;
$("flame-text").textContent = "red grew, blue shrank, the stronger the more; click to zoom in, the top row to zoom out";
$("inverted").parentElement.before(" ");
const widths = document.createElement("label"), choice = document.createElement("select");
widths.append("width: ", choice, " ");
for (const name of Object.keys(WIDTHS)) add(choice, "option", name).value = name;
choice.value = wide; choice.id = "width";
choice.onchange = () => { wide = choice.value; zoomed = []; flame(); };
$("inverted").parentElement.before(widths);
