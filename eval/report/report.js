// Controls and tables; draws everything once.

function fill(select, options) {
  let group = null;
  for (const {value, label, group: name} of options) {
    if (name && (!group || group.label !== name)) {
      group = select.appendChild(document.createElement('optgroup'));
      group.label = name;
    }
    (group || select).appendChild(new Option(label, value));
  }
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => row.cells[column].textContent.trim();
    const number = row => parseFloat(key(row).replaceAll(',', ''));
    const rows = [...table.tBodies[0].rows];
    const numeric = rows.every(row => key(row) === '' || !Number.isNaN(number(row)))
      && rows.some(row => key(row) !== '') && column > 0;
    const sign = down ? -1 : 1;
    rows.sort((a, b) => (key(a) === '') - (key(b) === '')  // what is unknown stays last
      || sign * (numeric ? number(a) - number(b) : key(a).localeCompare(key(b))));
    table.tBodies[0].append(...rows);
  }));
}

function listen(ids, draw) {
  for (const id of ids) byId(id).addEventListener('input', draw);
  draw();
}

document.querySelectorAll('table.sortable').forEach(makeSortable);
if (byId('differences')) drawDifferences();
if (byId('final')) listen(['final-log-x', 'final-log-y'], drawFinal);
if (byId('curves')) {
  const rates = [...new Set(DATA.cells.map(c => c.lr))].sort((a, b) => a - b);
  const best = rates.length > 1 && DATA.variants.some(v => v.best_lr !== null)
    ? [{value: 'best', label: 'each variant at its best learning rate'}] : [];
  const all = {value: 'all', label: 'all cells'};
  fill(byId('curves-lr'), [...(DATA.cells.length > MANY_CELLS ? [...best, all] : [all, ...best]),
    ...(rates.length > 1 ? rates.map(lr => ({value: lr, label: `learning rate ${lr}`})) : [])]);
  if (rates.length < 2) byId('curves-lr').parentElement.style.display = 'none';
  listen(['curves-lr', 'smoothing', 'curves-log-x', 'curves-log-y'], drawCurves);
  let wide = byId('curves').clientWidth >= NARROW;
  window.addEventListener('resize', () => {
    const now = byId('curves').clientWidth >= NARROW;
    if (now !== wide) { wide = now; drawCurves(); }
  });
}
if (byId('layers')) {
  const choices = layerChoices();
  fill(byId('layers-of'), choices.map((c, i) => ({...c, value: i})));
  fill(byId('layers-what'), DATA.quantities.map((q, i) => ({...q, value: i})));
  listen(['layers-of', 'layers-what', 'layers-layer', 'layers-log'], () => drawLayers(choices));
}
