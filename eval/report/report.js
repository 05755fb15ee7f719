// Draws the plots of a report from the JSON that the page holds. Plotly is in the page too.
'use strict';

const DATA = JSON.parse(document.getElementById('data').textContent);
const CONFIG = {responsive: true, displayModeBar: 'hover', displaylogo: false,
  showSendToCloud: false, plotlyServerURL: '',  // on by default: a button that uploads the data
  modeBarButtonsToRemove: ['lasso2d', 'select2d', 'zoomIn2d', 'zoomOut2d']};
const STILL = {...CONFIG, displayModeBar: false};
const INK = '#22262b', SOFT = '#646b73', LINE = '#e3e6e9';
const NARROW = 860;  // pixels: below, plots that stand side by side are stacked
const PLOTLY_DASH = {solid: 'solid', dashed: 'dash', dotted: 'dot', dashdot: 'dashdot'};
const byId = id => document.getElementById(id);
const escape = text => String(text).replace(/&/g, '&amp;').replace(/</g, '&lt;');
const several = DATA.variants.length > 1;
// Beyond these a legend above would leave a plot no room, and all curves at once nothing to see.
const MANY_VARIANTS = 8, MANY_CELLS = 60;
const ABOVE = {orientation: 'h', x: 0, y: 1.02, xanchor: 'left', yanchor: 'bottom'};
const BESIDE = {orientation: 'v', x: 1.04, y: 1, xanchor: 'left', yanchor: 'top', font: {size: 11},
  tracegroupgap: 0};
const beside = place => DATA.variants.length > MANY_VARIANTS && byId(place).clientWidth >= NARROW;
const legendOf = place => beside(place) ? BESIDE : ABOVE;
const heightOf = (place, usual) => beside(place)
  ? Math.max(usual, 90 + 19 * DATA.variants.length) : usual;

function axis(title, more) {
  return {title: {text: title, font: {size: 13, color: SOFT}, standoff: 8}, gridcolor: LINE,
    linecolor: '#c8cdd2', zeroline: false, automargin: true, tickfont: {color: SOFT}, ...more};
}

function layout(more) {
  return {font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: INK},
    paper_bgcolor: '#fff', plot_bgcolor: '#fff', hovermode: 'closest', uirevision: 'keep',
    margin: {l: 60, r: 40, t: 16, b: 48}, showlegend: several,
    modebar: {orientation: 'v', bgcolor: 'rgba(255,255,255,0)', color: '#b9bfc5', activecolor: SOFT},
    legend: ABOVE,
    hoverlabel: {bgcolor: '#fff', bordercolor: LINE, font: {color: INK}, align: 'left'}, ...more};
}

const seedRange = (low, high) => [...low, ...high.slice().reverse()];
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const rgba = (hex, alpha) =>
  `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(',')},${alpha})`;

// An axis of log(lr) with a tick at each learning rate that was swept.
function rateAxis(rates, log) {
  const text = rates.map(lr => lr.toPrecision(3) * 1 + '');
  return axis('learning rate', {type: log ? 'log' : 'linear', tickvals: rates, ticktext: text});
}

function drawFinal() {
  const rates = [...new Set(DATA.variants.flatMap(v => v.points.map(p => p.lr)))].sort((a, b) => a - b);
  if (rates.length < 2) return drawFinalByVariant();
  byId('final-note').textContent = 'Lines join means over seeds of the runs that finished, bands '
    + 'reach from the least to the greatest seed, dots are seeds. Crosses above the dotted line '
    + 'stand for runs that diverged; their height means nothing.';
  const logY = byId('final-log-y').checked;
  const all = DATA.variants.flatMap(v => v.points.flatMap(p => p.done));
  const low = Math.min(...all), high = Math.max(...all);
  const top = logY ? high * (high / low) ** 0.12 + 1e-6 : high + 0.12 * (high - low) + 1e-6;
  const step = logY ? (high / low) ** 0.05 : 0.05 * (high - low);
  const height = (n) => logY ? top * step ** n : top + step * n;
  const lost = DATA.variants.flatMap((v, i) => v.points.filter(p => p.diverged).map(p => [i, p.lr]));
  const stacked = (i, lr) => height(lost.filter(([j, other]) => j < i && other === lr).length);
  const traces = DATA.variants.flatMap((v, i) => finalTraces(v, i, stacked));
  const at = logY ? Math.log10(height(-0.6)) : height(-0.6);
  const line = {type: 'line', xref: 'paper', x0: 0, x1: 1, y0: height(-0.6), y1: height(-0.6),
    line: {color: '#b9bfc5', width: 1, dash: 'dot'}};
  const told = {text: 'diverged ↑', xref: 'paper', x: 0, y: at, xanchor: 'left', yanchor: 'bottom',
    showarrow: false, font: {size: 12, color: SOFT}};
  Plotly.react('final', traces, layout({
    height: heightOf('final', 440), legend: legendOf('final'),
    xaxis: rateAxis(rates, byId('final-log-x').checked),
    yaxis: axis('final ' + DATA.unit, {type: logY ? 'log' : 'linear'}),
    shapes: lost.length ? [line] : [], annotations: lost.length ? [told] : []}), CONFIG);
}

function finalTraces(v, i, stacked) {
  const points = v.points.filter(p => p.done.length), x = points.map(p => p.lr);
  const low = points.map(p => Math.min(...p.done)), high = points.map(p => Math.max(...p.done));
  const group = {legendgroup: String(i), name: escape(v.name)};
  const quiet = {...group, showlegend: false};
  const label = `<b>${escape(v.name)}</b><br>learning rate %{x}<br>`;
  const seeds = points.flatMap(p => p.done.map(y => [p.lr, y]));
  const lost = v.points.filter(p => p.diverged);
  return [
    {...quiet, x: seedRange(x, x), y: seedRange(low, high), mode: 'lines', fill: 'toself',
      fillcolor: rgba(v.color, 0.13), line: {width: 0}, hoverinfo: 'skip'},
    {...group, x, y: points.map(p => mean(p.done)), mode: 'lines+markers',
      line: {color: v.color, dash: PLOTLY_DASH[v.dash], width: 2}, marker: {size: 7},
      text: points.map(p => `mean of ${p.done.length}: ${mean(p.done).toFixed(4)}`),
      hovertemplate: label + '%{text}<extra></extra>'},
    {...quiet, x: seeds.map(s => s[0]), y: seeds.map(s => s[1]), mode: 'markers',
      marker: {color: v.color, size: 4, opacity: 0.5},
      hovertemplate: label + 'one seed: %{y:.4f}<extra></extra>'},
    {...quiet, x: lost.map(p => p.lr), y: lost.map(p => stacked(i, p.lr)), mode: 'markers',
      marker: {symbol: 'x', color: v.color, size: 10}, text: lost.map(p => `${p.diverged} diverged`),
      hovertemplate: label + '%{text}<extra></extra>'},
  ];
}

// Without learning rates to compare: one column a variant.
function drawFinalByVariant() {
  byId('final-by').textContent = 'variant';
  byId('final-controls').style.display = 'none';
  byId('final-note').textContent =
    'Dots are seeds; crosses stand for runs that diverged, at the loss at initialisation; diamonds '
    + 'are means of both with their interval.';
  const traces = DATA.variants.flatMap(v => {
    const seeds = v.points.flatMap(p => p.done), name = escape(v.name);
    const lost = v.points.filter(p => p.diverged);
    return [
      {x: seeds.map(() => name), y: seeds, mode: 'markers', showlegend: false, name,
        marker: {color: v.color, size: 6, opacity: 0.5},
        hovertemplate: `<b>${name}</b><br>one seed: %{y:.4f}<extra></extra>`},
      {x: lost.map(() => name), y: lost.map(() => v.initial), mode: 'markers', showlegend: false, name,
        marker: {color: v.color, size: 9, symbol: 'x'}, text: lost.map(p => `${p.diverged} diverged`),
        hovertemplate: `<b>${name}</b><br>%{text}<extra></extra>`},
      {x: [name], y: [v.mean], mode: 'markers', showlegend: false, name,
        error_y: {type: 'data', array: [v.half || 0], color: v.color},
        marker: {color: v.color, size: 10, symbol: 'diamond'},
        hovertemplate: `<b>${name}</b><br>mean: %{y:.4f}<extra></extra>`}];
  });
  Plotly.react('final', traces, layout({height: 380, showlegend: false, xaxis: axis('', {type: 'category'}),
    yaxis: axis('final ' + DATA.unit)}), CONFIG);
}

// Of [steps, values] over about `tau` steps; unbiased from the first value on.
function smooth([steps, values], tau) {
  if (!tau) return values;
  let sum = 0, weight = 0, before = steps.length > 1 ? 2 * steps[0] - steps[1] : 0;
  return values.map((value, i) => {
    const keep = Math.exp(-(steps[i] - before) / tau);
    before = steps[i];
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function drawCurves() {
  const chosen = byId('curves-lr').value, last = Math.max(
    ...DATA.cells.flatMap(c => [c.training[0].at(-1) || 0, c.validation[0].at(-1) || 0]));
  const tau = Number(byId('smoothing').value) / 100 * last;
  byId('smoothing-told').textContent = tau ? `${Math.round(tau)} steps` : 'none';
  const cells = DATA.cells.filter(c => chosen === 'all' || (chosen === 'best'
    ? DATA.variants[c.variant].best_lr === c.lr : String(c.lr) === chosen));
  const traces = [...DATA.variants.map(legendEntry), ...cells.flatMap(c => cellTraces(c, tau))];
  const narrow = byId('curves').clientWidth < NARROW;
  const x = {type: byId('curves-log-x').checked ? 'log' : 'linear'};
  const y = {type: byId('curves-log-y').checked ? 'log' : 'linear'};
  const validated = DATA.cells.some(c => c.validation[0].length);
  const left = !validated ? [0, 1] : [0, 0.47], right = [0.55, 1];
  const domains = narrow && validated
    ? [[0, 1], [0.57, 1], [0, 1], [0, 0.42]] : [left, [0, 1], right, [0, 1]];
  Plotly.react('curves', traces, layout({
    height: narrow && validated ? 820 : heightOf('curves', 480), legend: legendOf('curves'),
    xaxis: axis('step', {...x, domain: domains[0], anchor: 'y'}),
    yaxis: axis('training loss, nats per token', {...y, domain: domains[1], anchor: 'x'}),
    ...(validated && {xaxis2: axis('step', {...x, domain: domains[2], anchor: 'y2'}),
      yaxis2: axis('validation loss, nats per token', {...y, domain: domains[3], anchor: 'x2'})}),
  }), CONFIG);
}

// What stands for a variant in the legend, also where its curves are drawn faintly.
function legendEntry(v, i) {
  return {x: [null], y: [null], mode: 'lines', name: escape(v.name), legendgroup: String(i),
    line: {color: v.color, dash: PLOTLY_DASH[v.dash], width: 2.5}};
}

function cellTraces(cell, tau) {
  const v = DATA.variants[cell.variant], name = escape(v.name);
  const strong = v.best_lr === null || v.best_lr === cell.lr;
  const line = {color: v.color, dash: PLOTLY_DASH[v.dash], width: strong ? 1.8 : 1};
  const head = `<b>${name}</b><br>learning rate ${cell.lr}, ${escape(cell.seed)}<br>`
    + `${cell.cell} (${cell.status})<br>step %{x:,}: %{y:.4f}<extra></extra>`;
  const traces = [];
  for (const [curve, suffix, values] of [[cell.training, '', smooth(cell.training, tau)],
    [cell.validation, '2', cell.validation[1]]]) {
    if (!curve[0].length) continue;
    const place = {xaxis: 'x' + suffix, yaxis: 'y' + suffix, name, legendgroup: String(cell.variant),
      showlegend: false, hovertemplate: head};
    const points = curve[0].length < 12 ? 'lines+markers' : 'lines';
    traces.push({...place, x: curve[0], y: values, mode: points, line, marker: {size: 4},
      opacity: strong ? 0.95 : 0.4});
    const end = values.findLastIndex(value => value !== null);
    if (cell.status === 'diverged' && end >= 0) {
      traces.push({...place, x: [curve[0][end]], y: [values[end]], mode: 'markers',
        marker: {symbol: 'x', size: 9, color: v.color}});
    }
  }
  return traces;
}

// Means over seeds of each variant at its best learning rate, then single cells.
function layerChoices() {
  const choices = [];
  DATA.variants.forEach((v, i) => {
    const cells = DATA.cells.filter(c => c.variant === i && Object.keys(c.layers).length
      && (v.best_lr === null || c.lr === v.best_lr));
    if (cells.length > 1) {
      choices.push({group: 'mean over seeds', cells,
        label: `${v.name}, learning rate ${cells[0].lr}, ${cells.length} runs`});
    }
  });
  for (const cell of DATA.cells.filter(c => Object.keys(c.layers).length)) {
    const label = `${DATA.variants[cell.variant].name}, learning rate ${cell.lr}, ${cell.seed}`;
    choices.push({group: 'one run', cells: [cell], label: `${label} (${cell.cell})`});
  }
  return choices;
}

// [steps, values by step and layer] of the mean over cells, at the steps that all have.
function meanMap(cells, name) {
  const maps = cells.filter(c => c.layers[name]).map(c => new Map(
    c.layers[name][0].map((step, i) => [step, c.layers[name][1][i]])));
  if (!maps.length) return [[], []];
  const steps = [...maps[0].keys()].filter(step => maps.every(m => m.has(step)));
  const layer = (step, l) => {
    const values = maps.map(m => m.get(step)[l]);
    return values.some(value => value === null || value === undefined) ? null : mean(values);
  };
  return [steps, steps.map(step => maps[0].get(step).map((_, l) => layer(step, l)))];
}

function drawLayers(choices) {
  const {cells} = choices[Number(byId('layers-of').value)], log = byId('layers-log').checked;
  const names = [...new Set(cells.flatMap(c => Object.keys(c.layers)))];
  const box = byId('layers');
  box.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.purge(plot));
  box.replaceChildren();
  for (const name of names) {
    const [steps, values] = meanMap(cells, name);
    if (!steps.length) continue;
    const pair = box.appendChild(document.createElement('div'));
    pair.className = 'pair';
    const [left, right] = [0, 1].map(() => pair.appendChild(document.createElement('div')));
    drawMap(left, name, steps, values, log);
    drawDepth(right, steps, values, log);
  }
}

function drawMap(place, name, steps, values, log) {
  const depths = values[0].map((_, l) => l + 1);
  const shown = value => value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value;
  Plotly.newPlot(place, [{type: 'heatmap', x: steps.map(String), y: depths,
    z: depths.map(l => values.map(row => shown(row[l - 1]))),
    customdata: depths.map(l => values.map(row => row[l - 1])), colorscale: 'Viridis',
    colorbar: {thickness: 10, outlinewidth: 0, title: {text: log ? 'log10' : '', side: 'right'}},
    hovertemplate: 'step %{x}, layer %{y}<br>%{customdata:.4g}<extra></extra>'}],
  layout({height: 240, margin: {l: 50, r: 8, t: 34, b: 44}, showlegend: false,
    title: {text: escape(name.replaceAll('_', ' ')), font: {size: 14}, x: 0.01, xanchor: 'left', y: 0.97},
    xaxis: axis('step', {type: 'category', nticks: 8, tickangle: 0}),
    yaxis: axis('layer', {dtick: Math.ceil(depths.length / 8)})}), STILL);
}

function drawDepth(place, steps, values, log) {
  const ends = steps.length > 1 ? [0, steps.length - 1] : [0];
  const traces = ends.map((i, n) => ({x: values[i].map((_, l) => l + 1), y: values[i],
    mode: 'lines+markers', name: `step ${steps[i].toLocaleString('en')}`,
    line: {color: n ? '#0072b2' : '#9aa2aa', width: 2}, marker: {size: 6},
    hovertemplate: 'layer %{x}<br>%{y:.4g}'}));
  Plotly.newPlot(place, traces, layout({height: 240, margin: {l: 50, r: 8, t: 34, b: 44},
    showlegend: true, xaxis: axis('layer', {dtick: Math.ceil(values[0].length / 8)}),
    yaxis: axis('', {type: log ? 'log' : 'linear'})}), STILL);
}

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
  listen(['layers-of', 'layers-log'], () => drawLayers(choices));
}
