document.addEventListener("click", (event) => {
  const button = event.target.closest("th button");
  if (!button) return;
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "ascending";
  const value = (row) => {
    const cell = row.cells[column], given = cell.dataset.v;
    return given === undefined ? cell.textContent.trim() : given === "" ? NaN : Number(given);
  };
  const order = (a, b) => {
    const x = value(a), y = value(b);
    if (typeof x === "number" && typeof y === "number") {
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return down ? y - x : x - y;
    }
    return (down ? -1 : 1) * String(x).localeCompare(String(y));
  };
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...[...body.rows].sort(order));
});
