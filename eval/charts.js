// Draws the specifications that the page holds, each in the element of its name.
'use strict';

const {specs, light, dark} = JSON.parse(document.getElementById('charts').textContent);
const prefersDark = matchMedia('(prefers-color-scheme: dark)'), prints = matchMedia('print');
const views = {}, BESIDE = 90;  // pixels that a panel takes besides its own width

// As many panels in a row as have room, and what has the colour of text in that of the page.
function fitted(spec, width, look) {
  const own = JSON.parse(JSON.stringify(spec).replaceAll(light.title.color, look.title.color));
  if (own.columns) {
    const panel = (own.spec || own.concat[0]).width + BESIDE;
    own.columns = Math.max(1, Math.min(own.columns, Math.floor(width / panel)));
  }
  return own;
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
  const actions = {export: true, source: false, compiled: false, editor: false};
  const form = Object.assign(document.createElement('form'), {className: 'controls'});
  const inner = document.createElement('div');
  place.replaceChildren(form, inner);
  const options = {config: look, actions, renderer: 'svg', bind: form};
  vegaEmbed(inner, fitted(spec, place.clientWidth, look), options).then(({view}) => {
    views[name] = view;
    offerLog(name, form);
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
      scales.forEach(own => { own.scale = {...own.scale, ...type}; });
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
