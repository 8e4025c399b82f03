// ---- the moments of the slider, and the range between two of them ----
// A stay (pyalloc/traces/stays.py): 0 first mark, 1 last mark, 2 bytes, 3 blocks, 4 stack, 5 category, 6 origin.
const MARKS = D.marks, STAYS = D.stays;
let anchor = -1, wanted = "left"; // the mark where a range begins, -1: none; which of its blocks to show
const at = () => Number($("scrub").value);
const categories = [...new Set(STAYS.map(r => r[5]))].sort((a, b) => a - b), rowOf = new Map(categories.map((c, i) => [c, i]));
const heldBy = MARKS.map(() => new Float64Array(categories.length)); // by mark and category
for (const [first, last, bytes, , , category] of STAYS) for (let m = first; m <= last; m++) heldBy[m][rowOf.get(category)] += bytes;
const heldAt = heldBy.map(row => row.reduce((a, b) => a + b, 0));
const peakAt = MARKS.indexOf(T.peak_event);
const nearest = place => { let best = 0; MARKS.forEach((m, i) => { if (Math.abs(eventPlace(m) - place) < Math.abs(eventPlace(MARKS[best]) - place)) best = i; }); return best; };
const whenIs = event => event < 0 ? "before the first event" : `after event ${event.toLocaleString()}`;
const moment = () => D.moments.reduce((best, m) => Math.abs(m.event - MARKS[at()]) < Math.abs(best.event - MARKS[at()]) ? m : best); // the nearest one that has a map
const ends = () => [Math.min(anchor, at()), Math.max(anchor, at())];
function highest() { const [a, b] = ends(); let best = a; for (let m = a; m <= b; m++) if (heldAt[m] > heldAt[best]) best = m; return best; }
const WANTED = {
  left: ["allocated in it, alive at its end", (r, a, b) => r[0] > a && r[0] <= b && r[1] >= b],
  gone: ["alive before it, freed in it", (r, a, b) => r[0] <= a && r[1] >= a && r[1] < b],
  most: ["alive at its highest point", (r, a, b, top) => r[0] <= top && top <= r[1]],
};
function flameRows() { // what the flame graph shows
  const m = at();
  if (anchor < 0) return m === peakAt ? D.peakFlame : STAYS.filter(r => r[0] <= m && m <= r[1]);
  const [a, b] = ends(), top = highest();
  return wanted === "most" && top === peakAt ? D.peakFlame : STAYS.filter(r => WANTED[wanted][1](r, a, b, top));
}
function flameTitle() {
  const named = m => m === peakAt ? "of the peak" : whenIs(MARKS[m]);
  if (anchor < 0) return `Flame graph ${named(at())}`;
  const [a, b] = ends(), told = m => MARKS[m] < 0 ? "the beginning" : `event ${MARKS[m].toLocaleString()}`;
  if (wanted === "most") return `Flame graph ${named(highest())}, the highest point between ${told(a)} and ${told(b)}`;
  return wanted === "left" ? `Flame graph of what was allocated after ${told(a)} and still alive after ${told(b)}` : `Flame graph of what was alive after ${told(a)} and freed by ${told(b)}`;
}
// The timeline's bands: straight lines from mark to mark, because between marks only the sum is known.
function bands(g, x, y) {
  const low = MARKS.map(() => 0);
  categories.forEach((category, row) => {
    g.fillStyle = color(category); g.beginPath();
    MARKS.forEach((m, i) => g.lineTo(x(eventPlace(m)), y(low[i])));
    for (let i = MARKS.length - 1; i >= 0; i--) g.lineTo(x(eventPlace(MARKS[i])), y(low[i] + heldBy[i][row]));
    g.fill();
    MARKS.forEach((m, i) => { low[i] += heldBy[i][row]; });
  });
}
const bandsAt = m => categories.map((c, row) => [D.names[c], heldBy[m][row]]).filter(p => p[1] > 0).sort((p, q) => q[1] - p[1]);
function rangeMoved(from, to) { anchor = from; if (to !== undefined) $("scrub").value = to; zoomed = []; picked = 0; scrubbed(); }
for (const [kind, [text]] of Object.entries(WANTED)) {
  const b = add($("range-modes"), "button", text);
  b.dataset.wanted = kind; b.onclick = () => { wanted = kind; rangeMoved(anchor); };
}
$("range-begin").onclick = () => rangeMoved(anchor < 0 ? at() : -1);
$("range").hidden = !D.hasStacks; // the flame graph shows it
function showRange() {
  $("range-begin").textContent = anchor < 0 ? "begin a range here" : "clear range";
  $("range-modes").hidden = anchor < 0;
  for (const b of $("range-modes").children) b.setAttribute("aria-pressed", b.dataset.wanted === wanted);
}
