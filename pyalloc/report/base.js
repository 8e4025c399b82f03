// ---- what every page has: its data, sizes in words, colours, pens ----
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FULL = 1023.95; // as in units.py
const size = n => n < 512 ? Math.round(n) + (Math.round(n) === 1 ? " byte" : " bytes") : n >= FULL * 2 ** 20 ? (n / 2 ** 30).toFixed(2) + " GiB" : n >= FULL * 2 ** 10 ? (n / 2 ** 20).toFixed(1) + " MiB" : (n / 2 ** 10).toFixed(1) + " KiB";
const add = (parent, tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (name) e.className = name; parent.append(e); return e; };
const coded = (parent, text) => text.split("`").forEach((part, i) => { if (part) add(parent, i % 2 ? "code" : "span", part); });
const PALETTE = ["#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#84cc16", "#ec4899", "#a16207", "#64748b", "#0f766e"];
const KNOWN = { activations: 2, "backward temporaries": 3, buffers: 8, "freed, other streams work on it": 10, gradients: 0, "idle in private pools": 7, "optimizer state": 5, parameters: 4, temporaries: 1, workspace: 9 };
const ALARM = PALETTE[3], PHASE_COLORS = PALETTE.slice(1).filter(c => c !== ALARM); // reserved for the peak and for out of memory
const color = i => i === 0 ? css("--idle") : PALETTE[KNOWN[D.names[i]] ?? (i % 2 ? 6 : 7)];
const tip = $("tip");
function showTip(event, text) {
  tip.style.display = text ? "block" : "none";
  tip.textContent = text;
  tip.style.left = "0px"; // or its place would limit its width
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 12 + "px";
}
function pen(canvas) {
  const ratio = devicePixelRatio || 1, height = Number(canvas.dataset.height || (canvas.dataset.height = canvas.getAttribute("height")));
  canvas.style.height = height + "px";
  canvas.width = canvas.clientWidth * ratio; canvas.height = height * ratio;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio); g.clearRect(0, 0, canvas.clientWidth, height);
  return [g, canvas.clientWidth, height];
}
// The nearest edge of a device's pixel: elsewhere, side by side areas show their background between them.
const edge = x => Math.round(x * (devicePixelRatio || 1)) / (devicePixelRatio || 1);
const frame = (stack, i) => D.frames[D.stacks[stack][i]];
const lines = stack => stack < 0 || !D.stacks[stack] ? [] : D.stacks[stack].map(f => D.frames[f][0]).reverse();
function leaf(frames) { // the index of the innermost Python frame
  let i = frames.length - 1;
  while (i > 0 && D.frames[frames[i]][1] > 1) i--;
  return i;
}
function own(stack) { // the innermost line of the user's code
  if (stack < 0 || !D.stacks[stack]) return "";
  let i = D.stacks[stack].length - 1;
  while (i > 0 && frame(stack, i)[1]) i--;
  return frame(stack, frame(stack, i)[1] ? leaf(D.stacks[stack]) : i)[0];
}
const LEFT = 70; // pixels of a timeline, for the numbers of its axis
function axis(g, width, top, y) {
  g.font = "11px system-ui"; g.fillStyle = css("--soft"); g.strokeStyle = css("--line"); g.textAlign = "right";
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(top / 6))), last = g.canvas.clientHeight - 1; // three to six round amounts
  for (let v = 0; v <= top; v += step) {
    g.fillText(v ? size(v).replace(/\.?0+ (?=.iB)/, " ") : "0", LEFT - 6, Math.min(last, Math.max(10, y(v) + 4)));
    g.beginPath(); g.moveTo(LEFT, y(v)); g.lineTo(width, y(v)); g.stroke();
  }
}
