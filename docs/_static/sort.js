// Sorts the rows of a table by the column whose head is clicked, and backwards at the second click.
// Cells that begin with a number are compared by it, others as text; equal ones keep their order.

const compared = (a, b) => {
  const [x, y] = [parseFloat(a), parseFloat(b)];
  return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
};

const sortBy = (table, column, sign) => {
  const text = (row) => row.cells[column].textContent.trim();
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => sign * compared(text(a), text(b)));
  table.tBodies[0].append(...rows);
};

document.addEventListener('DOMContentLoaded', () => {
  for (const table of document.querySelectorAll('table')) {
    if (!table.tHead || !table.tBodies.length) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      let sign = -1;
      head.style.cursor = 'pointer';
      head.title = 'sort by this column';
      head.addEventListener('click', () => sortBy(table, column, (sign = -sign)));
    });
  }
});
