// ---- events one by one: around the chosen moment, of the chosen block, or with certain words ----
const EVENT_ROWS = 16, X = D.events.texts;
// A row: 0 event, 1 microseconds, 2 what, 3 bytes, 4 address, 5 stream, 6 device, 7 pool, 8 line, 9 stack, 10 allocated at.
let listed = D.events.rows, firstRow = 0, row = 0;
const severalStreams = new Set(listed.map(r => r[5])).size > 1, severalDevices = new Set(listed.map(r => r[6])).size > 1;
const hex = n => n ? "0x" + n.toString(16) : "";
function whatOf(r) {
  const more = [r[7] ? X[r[7]] : "", severalStreams && r[4] ? "stream " + X[r[5]] : "", severalDevices ? "device " + r[6] : ""].filter(t => t);
  return X[r[2]] + (more.length ? ` (${more.join(", ")})` : "");
}
const isBlock = r => r[10] >= 0;
const partners = r => isBlock(r) ? D.events.rows.filter(o => o[10] === r[10] && o[6] === r[6] && o !== r) : [];
function indexOf(event) { // the index of the first row at or after an event
  let low = 0;
  for (let high = listed.length; low < high;) { const mid = (low + high) >> 1; if (listed[mid][0] < event) low = mid + 1; else high = mid; }
  return Math.min(low, listed.length - 1);
}
function showEvents() {
  const body = $("events-rows"), known = $("events-only").value !== "";
  body.textContent = "";
  listed.slice(firstRow, firstRow + EVENT_ROWS).forEach((r, i) => {
    const at = firstRow + i, before = listed[at - 1], line = add(body, "tr");
    line.setAttribute("aria-selected", at === row);
    if (!known && before && r[0] - before[0] > 8) line.className = "gap"; // the events between are not in this page
    for (const [text, name] of [[r[0].toLocaleString(), "n"], [(r[1] / 1000).toFixed(3), "n wide"], [whatOf(r)], [r[3] ? size(r[3]) : "", "n"], [hex(r[4]), "wide"], [X[r[8]], "name"]]) add(line, "td", text, name || "").title = text;
    line.onclick = () => chooseEvent(at, true);
  });
  const all = D.events.rows, last = listed[Math.min(listed.length, firstRow + EVENT_ROWS) - 1];
  const left = all.length && all.length < T.n_events ? ` This page has ${all.length.toLocaleString()} of them: those of the step above nearest to the peak, and some around each moment of the slider; a double line marks a gap. \`pyalloc events\` shows all.` : "";
  $("events-text").textContent = "";
  coded($("events-text"), listed.length ? `Events ${listed[firstRow][0].toLocaleString()} to ${last[0].toLocaleString()} of ${T.n_events.toLocaleString()}.${left}` : "No event in this page matches.");
}
function chooseEvent(at, isAsked) {
  if (!listed.length) { $("events-stack").textContent = ""; $("events-other").hidden = true; return showEvents(); }
  row = Math.max(0, Math.min(listed.length - 1, at));
  if (row < firstRow || row >= firstRow + EVENT_ROWS) firstRow = Math.max(0, Math.min(listed.length - EVENT_ROWS, row - (EVENT_ROWS >> 1)));
  showEvents();
  const r = listed[row], other = partners(r)[0], button = $("events-other");
  $("events-stack").textContent = isAsked ? `${whatOf(r)}${r[3] ? ", " + size(r[3]) : ""}${r[4] ? " at " + hex(r[4]) : ""}${isBlock(r) && r[10] !== r[0] ? ", allocated by event " + r[10].toLocaleString() : ""}\n${lines(r[9]).join("\n")}` : "";
  button.hidden = !isAsked || !other;
  if (other) {
    button.textContent = `${X[other[2]]} by event ${other[0].toLocaleString()}`;
    button.onclick = () => { if (!listed.includes(other)) only(""); chooseEvent(listed.indexOf(other), true); };
  }
  const span = isAsked && isBlock(r) ? W.spans.findIndex(s => s[1] === r[10]) : -1;
  if (span >= 0 && span !== chosen) { chosen = span; blocks(); }
}
function only(words) {
  $("events-only").value = words;
  const wanted = words.toLowerCase().split(/\s+/).filter(w => w), event = listed.length ? listed[row][0] : 0;
  listed = D.events.rows.filter(r => { const text = `${whatOf(r)} ${size(r[3])} ${hex(r[4])} ${X[r[8]]} ${r[0]}`.toLowerCase(); return wanted.every(w => text.includes(w)); });
  firstRow = row = 0;
  chooseEvent(listed.length ? indexOf(event) : 0, false);
}
// Called when the rest of the page looks at an event: shows it, or the next one that is here.
function lookAtEvent(event) { if (D.events.rows.length && listed.length) chooseEvent(indexOf(event), false); }
function turn(by) { chooseEvent(row + by, true); }
$("events-only").oninput = () => only($("events-only").value);
$("events-earlier").onclick = () => turn(-EVENT_ROWS);
$("events-later").onclick = () => turn(EVENT_ROWS);
$("events").addEventListener("keydown", event => {
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -EVENT_ROWS, PageDown: EVENT_ROWS, Home: -listed.length, End: listed.length }[event.key];
  if (!by) return;
  turn(by); event.preventDefault();
});
$("events-section").hidden = !D.events.rows.length;
