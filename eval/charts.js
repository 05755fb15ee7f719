// Draws the specifications that the page holds, each in the element of its name.
'use strict';

const {specs, light, dark} = JSON.parse(document.getElementById('charts').textContent);
const prefersDark = matchMedia('(prefers-color-scheme: dark)'), prints = matchMedia('print');
const views = {}, BESIDE = 90;  // pixels that a panel takes besides its own width
const NARROW = 640, LEAST_PANEL = 120, CHARACTER = 6.5, MENU = 38;  // pixels

// The views of a specification that have a width.
function panelsOf(spec) {
  const parts = spec.concat || spec.hconcat || spec.vconcat || (spec.spec ? [spec.spec] : null);
  return parts ? parts.flatMap(panelsOf) : [spec];
}

function visit(node, change) {
  if (!node || typeof node !== 'object') return;
  change(node);
  for (const [key, child] of Object.entries(node)) if (key !== 'data') visit(child, change);
}

// What is drawn on a phone: short labels, legends above, and no words beside a plot.
function narrowed(spec, width) {
  visit(spec, node => {
    if (node.layer) node.layer = node.layer.filter(layer => layer.name !== 'beside');
    if (node.labelLimit) node.labelLimit = Math.min(node.labelLimit, width / 3);
    const {legend, scale} = node;
    if (!legend) return;
    if (legend.gradientLength) Object.assign(legend, {orient: 'top', direction: 'horizontal', gradientLength: width / 2});
    if (legend.columns && scale?.domain) {
      const longest = Math.max(...scale.domain.map(name => String(name).length)) * CHARACTER + 40;
      legend.columns = Math.max(1, Math.min(legend.columns, Math.floor(width / longest)));
      legend.labelLimit = width - 60;
    }
  });
}

// As many panels in a row as have room, and what has the colour of text in that of the page.
function fitted(spec, width, look) {
  const own = JSON.parse(JSON.stringify(spec).replaceAll(light.title.color, look.title.color));
  if (width < NARROW) narrowed(own, width);
  if (own.columns) {
    const panel = panelsOf(own)[0].width + BESIDE;
    own.columns = Math.max(1, Math.min(own.columns, Math.floor(width / panel)));
  }
  return own;
}

// Draws a specification; panels become narrower until they and their labels have room.
async function embed(inner, spec, options, width, tries = 3) {
  const result = await vegaEmbed(inner, spec, options);
  const excess = inner.querySelector('svg.marks').getBoundingClientRect().width - width;
  if (excess <= 0 || !tries) return result;
  const share = Math.ceil(excess / (spec.columns || 1));
  for (const panel of panelsOf(spec)) panel.width = Math.max(LEAST_PANEL, panel.width - share);
  result.finalize();
  return embed(inner, spec, options, width, tries - 1);
}

function draw(name) {
  const place = document.getElementById(name), spec = specs[name];
  const look = prefersDark.matches && !prints.matches ? dark : light;
  for (const param of views[name] ? spec.params || [] : []) {  // what was chosen stays chosen
    if (param.bind === 'legend') {
      const field = param.select.fields[0];
      param.value = views[name].data(`${param.name}_store`).map(one => ({[field]: one.values[0]}));
    } else if (param.bind.input) param.value = views[name].signal(param.name);
  }
  const width = place.closest('.charts')?.clientWidth || place.clientWidth || innerWidth;
  const isNarrow = width < NARROW;
  const actions = isNarrow ? false : {export: true, source: false, compiled: false, editor: false};
  const form = Object.assign(document.createElement('form'), {className: 'controls'});
  const inner = document.createElement('div');
  place.replaceChildren(form, inner);
  const options = {config: look, actions, renderer: 'svg', bind: form};
  const room = isNarrow ? width : width - MENU;
  embed(inner, fitted(spec, width, look), options, room).then(({view}) => {
    views[name] = view;
    offerLog(name, form);
    markOverflow(place);
  });
}

function drawAll() {
  for (const name of Object.keys(specs)) {
    if (!document.getElementById(name).hidden) draw(name);
  }
}

function scalesOf(node, channel) {
  if (!node || typeof node !== 'object') return [];
  const own = node.encoding?.[channel], found = own?.type === 'quantitative' ? [own] : [];
  const inner = Object.entries(node).filter(([key]) => !['data', 'datasets', 'encoding'].includes(key));
  return found.concat(...inner.map(([, child]) => scalesOf(child, channel)));
}

function offerLog(name, form) {
  for (const [channel, label] of Object.entries(specs[name].usermeta?.log || {})) {
    const box = Object.assign(document.createElement('input'), {type: 'checkbox'});
    const scales = scalesOf(specs[name], channel);
    box.checked = scales.some(own => own.scale?.type === 'log');
    box.addEventListener('input', () => {
      const type = box.checked ? {type: 'log', zero: undefined} : {type: 'linear', zero: false};
      // Vega labels only some ticks of a logarithmic axis, and none if it spans less than a decade.
      const labelExpr = box.checked ? 'datum.label || format(datum.value, "~g")' : 'datum.label';
      scales.forEach(own => {
        own.scale = {...own.scale, ...type};
        own.axis = {...own.axis, labelExpr, labelOverlap: box.checked ? 'greedy' : true};
      });
      draw(name);
    });
    form.appendChild(document.createElement('label')).append(box, ' ', label);
  }
}

// Shows those charts of an element that a choice names.
function choose(select) {
  for (const place of document.getElementById(select.dataset.shows).children) {
    place.hidden = !select.value.split(' ').includes(place.id);
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
    const rows = [...table.tBodies[0].rows], known = rows.map(key).filter(text => text !== '');
    const numeric = column > 0 && known.length && known.every(text => !Number.isNaN(parseFloat(text)));
    rows.sort((a, b) => (key(a) === '') - (key(b) === '')  // what is unknown stays last
      || (down ? -1 : 1) * (numeric ? number(a) - number(b) : key(a).localeCompare(key(b))));
    table.tBodies[0].append(...rows);
  }));
}

// Marks a container whose content is wider: a line above it tells to scroll.
function markOverflow(box) {
  box.classList.toggle('more', box.scrollWidth > box.clientWidth + 1);
}

for (const box of document.querySelectorAll('.scroll, .chart')) {
  const cue = {className: 'cue', textContent: 'Scroll sideways for more →'};
  box.before(Object.assign(document.createElement('div'), cue));
  new ResizeObserver(() => markOverflow(box)).observe(box);
}

// Paper cannot be unfolded: explanations are printed open.
addEventListener('beforeprint', () => {
  for (const details of document.querySelectorAll('details.how:not([open])')) {
    details.open = details.dataset.printed = true;
  }
});
addEventListener('afterprint', () => {
  for (const details of document.querySelectorAll('details[data-printed]')) {
    details.open = false;
    delete details.dataset.printed;
  }
});

document.querySelectorAll('table.sortable').forEach(makeSortable);
for (const select of document.querySelectorAll('select[data-shows]')) {
  select.addEventListener('input', () => { choose(select); drawAll(); });
  choose(select);
}
prefersDark.addEventListener('change', drawAll);
prints.addEventListener('change', drawAll);
let width = innerWidth;
addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
drawAll();
