// ---- flame graph of what flameRows() gives ----
// A row: 2 bytes, 3 blocks, 4 stack, 6 origin; with two moments also 7 bytes before, 8 blocks before.
// A page's LOOK gives the width of a call from what its own lines held before and after, its colour and its texts.
const ROW = 19;
let zoomed = [], cells = [], sought = "";
function tree() {
  const foreign = $("foreign").checked, apart = { threads: 0, streams: 1 }[$("apart").value];
  const node = (name, foreign) => ({ name, bytes: 0, blocks: 0, after: 0, before: 0, blocksBefore: 0, foreign, found: 0, isHit: false, own: [0, 0], children: new Map() });
  const root = node("all", 0);
  for (const [, , bytes, n, stack, , origin, before = 0, nBefore = 0] of flameRows()) {
    const all = stack < 0 ? [] : D.stacks[stack], last = leaf(all);
    const own = all.filter((f, i) => foreign || !D.frames[f][1] || i === last).map(f => D.frames[f]);
    if ($("inverted").checked) own.reverse();
    if (apart !== undefined) own.unshift([D.origins[origin][apart], 0]);
    let at = root;
    for (const f of [null, ...own]) {
      if (f) {
        if (!at.children.has(f[0])) at.children.set(f[0], node(...f));
        at = at.children.get(f[0]);
      }
      at.after += bytes; at.blocks += n; at.before += before; at.blocksBefore += nBefore;
    }
    at.own[0] += before; at.own[1] += bytes;
    at.isHit = Boolean(sought) && own.some(f => isSought(f[0]));
  }
  const weigh = node => {
    node.bytes = LOOK.width(...node.own); node.found = node.isHit ? node.bytes : 0;
    for (const child of node.children.values()) { weigh(child); node.bytes += child.bytes; node.found += child.found; }
  };
  weigh(root);
  return root;
}
const isSought = name => sought.split(/\s+/).every(word => name.toLowerCase().includes(word));
const partOf = (node, w, child) => w * child.bytes / Math.max(1, node.bytes); // the child's width, if the node's is w
const depthOf = (node, w) => 1 + [...node.children.values()].filter(c => partOf(node, w, c) >= .6).reduce((most, c) => Math.max(most, depthOf(c, partOf(node, w, c))), 0);
const bySize = node => [...node.children.values()].sort((a, b) => b.bytes - a.bytes);
const nBlocks = n => `${n.toLocaleString()} block${n === 1 ? "" : "s"}`;
function hue(name) { let h = 0; for (const c of name.split(" ")[0]) h = (h * 31 + c.charCodeAt(0)) % 60; return h; }
function flame() {
  const root = tree();
  $("flame-title").textContent = `${flameTitle()}: ${LOOK.told(root)}`;
  $("found-text").textContent = sought ? `${size(root.found)} (${(100 * root.found / Math.max(1, root.bytes)).toFixed(1)} %) by stacks with it` : "";
  let node = root;
  for (const name of zoomed) { const next = node.children.get(name); if (!next) break; node = next; }
  const canvas = $("flame");
  canvas.dataset.height = Math.min(60, depthOf(node, canvas.clientWidth) + (node === root ? 0 : 1)) * ROW;
  const [g, width] = pen(canvas);
  cells = []; g.font = "11px system-ui"; g.textBaseline = "middle";
  const cell = (item, x, y, w, path) => {
    if (w < .6) return;
    const isTop = item === root || path.length === 0, isFound = sought && !isTop && isSought(item.name);
    g.globalAlpha = sought && !isTop && !isFound ? .3 : 1;
    g.fillStyle = isFound ? PALETTE[4] : item.foreign && !LOOK.isTwo ? css("--idle") : isTop ? css("--line") : LOOK.color(item);
    g.fillRect(x, y, Math.max(w - .6, .4), ROW - 1);
    g.globalAlpha = 1;
    cells.push([x, y, w, item, path]);
    if (w > 34) { g.save(); g.beginPath(); g.rect(x, y, w - 4, ROW); g.clip(); g.fillStyle = isFound ? "#fff" : item.foreign || isTop || sought || LOOK.isTwo ? css("--ink") : "#221403"; g.fillText(LOOK.isTwo && !isTop ? `${LOOK.told(item)}  ${item.name}` : `${item.name}  ${LOOK.told(item)}`, x + 4, y + ROW / 2); g.restore(); }
  };
  const draw = (item, x, y, w, path) => {
    cell(item, x, y, w, path);
    let at = x;
    for (const child of bySize(item)) {
      const part = partOf(item, w, child);
      if (part >= .6) draw(child, at, y + ROW, part, [...path, child.name]);
      at += part;
    }
  };
  if (node === root) draw(root, 0, 0, width, []);
  else { cell(root, 0, 0, width, []); draw(node, 0, ROW, width, zoomed); }
}
function cellAt(event) {
  const box = $("flame").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  return cells.find(c => x >= c[0] && x < c[0] + c[2] && y >= c[1] && y < c[1] + ROW);
}
$("flame").addEventListener("mousemove", event => {
  const c = cellAt(event);
  showTip(event, c ? `${c[3].name}\n${LOOK.tip(c[3], cells[0][3])}` : "");
});
$("flame").addEventListener("click", event => { const c = cellAt(event); if (c) { zoomed = c[4]; flame(); } });
$("flame").addEventListener("keydown", event => {
  let over = null, node = tree();
  for (const name of zoomed) { const next = node.children.get(name); if (!next) break; over = node; node = next; }
  const beside = over ? bySize(over) : [node], step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const down = bySize(node)[0];
  if (event.key === "ArrowDown") { if (down) { zoomed = [...zoomed, down.name]; node = down; } }
  else if (event.key === "ArrowUp" || event.key === "Escape") { zoomed = event.key === "Escape" ? [] : zoomed.slice(0, -1); node = zoomed.length ? over : null; }
  else if (step) { node = beside[Math.min(beside.length - 1, Math.max(0, beside.indexOf(node) + step))]; if (over) zoomed = [...zoomed.slice(0, -1), node.name]; }
  else return;
  event.preventDefault();
  $("flame-at").textContent = node && zoomed.length ? `${node.name}: ${LOOK.isTwo ? LOOK.tip(node) : `${size(node.bytes)}, ${nBlocks(node.blocks)}`}` : "";
  flame();
});
$("flame").addEventListener("mouseleave", event => showTip(event, ""));
$("flame-section").hidden = !D.hasStacks;
$("foreign").onchange = $("inverted").onchange = $("apart").onchange = () => { zoomed = []; flame(); };
$("sought").oninput = () => { sought = $("sought").value.trim().toLowerCase(); flame(); };
["threads", "streams"].forEach((kind, i) => { if (new Set(D.origins.map(o => o[i])).size > 1) add($("apart"), "option", kind).value = kind; });
$("apart").parentElement.hidden = $("apart").children.length < 2;
