// ---- blocks stacked in the order of their requests, over the columns of a canvas ----
// A span: 0 bytes, 1 begin, 2 end (-1: never).
function stackColumns(spans, first, events, n) { // for each of n columns, the spans alive when they held most
  const begins = spans.map((s, i) => [s[1], 1, i]), ends = [];
  spans.forEach((s, i) => { if (s[2] >= 0) ends.push([s[2], 0, i]); });
  const changes = begins.concat(ends).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const found = [];
  let live = [], sum = 0, at = 0, last = [];
  const apply = ([, begins, i]) => { if (begins) { live.push(i); sum += spans[i][0]; } else { live.splice(live.indexOf(i), 1); sum -= spans[i][0]; } };
  for (; at < changes.length && changes[at][0] < first; at++) apply(changes[at]); // before what is shown
  last = live.slice();
  for (let c = 0; c < n; c++) {
    const end = first + (c + 1) * events / n;
    let best = last, most = sum;
    for (; at < changes.length && changes[at][0] < end; at++) {
      apply(changes[at]);
      if (sum >= most) { most = sum; best = live.slice(); }
      last = null;
    }
    last = last || live.slice();
    found.push(best || last);
  }
  return found;
}
const LEAST_TALL = .5, APART = 3; // pixels of a piece of a column: smaller ones join the next, larger ones have an edge
function piecesOf(column, spans, fills, scale, chosen) { // [tall, colour, has an edge, ...]; small neighbours of one colour are joined
  const found = [];
  let tall = 0, most = 0, fill = "";
  const close = () => { if (tall > 0) found.push(tall, fill, false); tall = most = 0; fill = ""; };
  for (const i of column) {
    const own = spans[i][0] * scale;
    if (own > APART || i === chosen) { close(); found.push(Math.max(own, i === chosen ? 1 : 0), fills[i], own > APART); continue; }
    if (tall >= LEAST_TALL && fills[i] !== fill) close();
    tall += own;
    if (own > most) { most = own; fill = fills[i]; }
  }
  close();
  return found;
}
// Most blocks span several columns, and many are thinner than a pixel: a rectangle covers all columns in which it stays the same.
function drawColumns(g, columns, spans, fills, scale, bottom, chosen) {
  const paper = css("--paper"), open = []; // rectangles not drawn yet, from the bottom up: [first column, y, tall, colour, has an edge]
  if (chosen >= 0) { fills = fills.slice(); fills[chosen] = css("--ink"); }
  const flush = (from, until) => {
    for (const [begin, y, tall, fill, hasEdge] of open.splice(from)) {
      const left = edge(LEFT + begin), wide = edge(LEFT + until) - left;
      g.fillStyle = fill; g.fillRect(left, y, wide, tall);
      if (hasEdge) { g.fillStyle = paper; g.fillRect(left, y, wide, .6); }
    }
  };
  for (let c = 0; c < columns.length; c++) {
    if (c && columns[c] === columns[c - 1]) continue;
    const pieces = piecesOf(columns[c], spans, fills, scale, chosen);
    let y = bottom, n = 0;
    for (let p = 0; p < pieces.length; p += 3, n++) {
      const tall = pieces[p], same = open[n];
      y -= tall;
      if (same && same[1] === y && same[2] === tall && same[3] === pieces[p + 1] && same[4] === pieces[p + 2]) continue;
      flush(n, c);
      open.push([c, y, tall, pieces[p + 1], pieces[p + 2]]);
    }
    flush(n, c);
  }
  flush(0, columns.length);
}
