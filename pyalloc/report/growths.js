// ---- what reserved memory grew for, over the run ----
// A row: 0 bytes, 1 begin, 2 end (-1: never), 3 name, 4 stack, 5 pieces.
const G = D.growths.rows, OTHERS = "#98a2b3";
let grownColumns = [], grownScale = 1, grown = -1;
const grownColor = row => PALETTE[row[3]] || OTHERS;
function growths() {
  if (!G.length) return;
  const [g, width, height] = pen($("growths")), w = width - LEFT, h = height - 6;
  const top = Math.max(1, T.peak_reserved_bytes) * 1.05, y = v => h * (1 - v / top) + 2, x = p => LEFT + p * w;
  axis(g, width, top, y);
  const outline = () => D.bins.forEach((bin, i) => { const next = D.bins[i + 1]; g.lineTo(x(place(bin)), y(bin[4])); g.lineTo(x(next ? place(next) : 1), y(bin[4])); });
  g.fillStyle = css("--idle"); g.beginPath(); g.moveTo(LEFT, y(0)); // below the others: what is too small to be shown
  outline(); g.lineTo(x(1), y(0)); g.fill();
  grownScale = h / top;
  // what grew with the last event gets the last column
  const spans = G.map(r => [r[0], Math.min(eventPlace(r[1]), 1 - 1e-9), r[2] < 0 ? -1 : eventPlace(r[2])]);
  grownColumns = stackColumns(spans, 0, 1, Math.max(1, Math.floor(w)));
  drawColumns(g, grownColumns, G, G.map(grownColor), grownScale, y(0), grown);
  g.strokeStyle = css("--ink"); g.lineWidth = 1; g.beginPath(); outline(); g.stroke();
}
const grownText = r => `${size(r[0])}${r[5] > 1 ? ` in ${r[5]} pieces` : ""} for ${D.growths.names[r[3]] ? D.growths.names[r[3]][0] : own(r[4])}\nreserved from event ${r[1].toLocaleString()} to ${r[2] < 0 ? "the end" : r[2].toLocaleString()}`;
function grownAt(event) {
  const box = $("growths").getBoundingClientRect(), column = grownColumns[Math.floor(event.clientX - box.left - LEFT)];
  let sum = (box.height - 4 - (event.clientY - box.top)) / grownScale;
  if (!column || sum < 0) return -1;
  for (const i of column) { if (sum < G[i][0]) return i; sum -= G[i][0]; }
  return -1;
}
function chooseGrown(i) {
  grown = i; growths(); lookAtEvent(G[i][1]);
  $("growths-stack").textContent = `${grownText(G[i])}\n${lines(G[i][4]).join("\n")}`;
}
$("growths").addEventListener("mousemove", event => { const i = grownAt(event); showTip(event, i < 0 ? "" : grownText(G[i])); });
$("growths").addEventListener("click", event => { const i = grownAt(event); if (i >= 0) chooseGrown(i); });
$("growths").addEventListener("keydown", event => {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!step || !G.length) return;
  const order = [...G.keys()].sort((a, b) => G[b][0] - G[a][0]), at = order.indexOf(grown);
  chooseGrown(order[at < 0 ? 0 : Math.min(order.length - 1, Math.max(0, at + step))]);
  event.preventDefault();
});
D.growths.names.slice(0, PALETTE.length).forEach(([name], i) => { const s = add($("growths-legend"), "span"); add(s, "i").style.background = PALETTE[i]; s.append(name); });
if (D.growths.names.length > PALETTE.length) { const s = add($("growths-legend"), "span"); add(s, "i").style.background = OTHERS; s.append("other lines"); }
add($("growths-legend"), "span", "line: total reserved", "soft");
$("growths-section").hidden = !G.length;
