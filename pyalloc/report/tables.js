// ---- a table of rows grouped by one thing or another; a click on a column's head sorts it ----
const FEW = 12; // rows shown at first
// columns: [title, class, a row's sort key (null: not sortable), what fills its cell]; tables: rows by kind, each in its own order.
function tabbed({ tabs, table, more, tables, columns }) {
  let kind = Object.keys(tables)[0], isAll = false, by = -1, isUp = false;
  const [head, body] = [table.tHead, table.tBodies[0]], heads = [];
  function sorted(rows) {
    if (by < 0) return rows;
    const key = columns[by][2], turn = isUp ? 1 : -1;
    return [...rows].sort((a, b) => { const [p, q] = [key(a), key(b)]; return turn * (typeof p === "string" ? p.localeCompare(q, undefined, { numeric: true }) : p - q); });
  }
  function show() {
    for (const button of tabs.children) button.setAttribute("aria-pressed", button.dataset.kind === kind);
    heads.forEach((cell, i) => { if (i === by) cell.setAttribute("aria-sort", isUp ? "ascending" : "descending"); else cell.removeAttribute("aria-sort"); });
    const rows = sorted(tables[kind] || []);
    body.textContent = "";
    for (const row of isAll ? rows : rows.slice(0, FEW)) {
      const line = add(body, "tr");
      for (const [, name, , fill] of columns) fill(add(line, "td", undefined, name), row);
    }
    more.hidden = rows.length <= FEW;
    more.textContent = isAll ? "fewer" : `${rows.length - FEW} more`;
  }
  more.onclick = () => { isAll = !isAll; show(); };
  for (const each of Object.keys(tables)) { const b = add(tabs, "button", "by " + each); b.dataset.kind = each; b.onclick = () => { kind = each; by = -1; show(); }; }
  const line = add(head, "tr");
  columns.forEach(([title, name, key], i) => {
    const cell = add(line, "th", undefined, name);
    heads.push(cell);
    if (!key) { cell.append(title); return; }
    const button = add(cell, "button", title);
    button.title = "sort";
    button.onclick = () => { isUp = by === i ? !isUp : name === "name"; by = i; show(); };
  });
  show();
}
