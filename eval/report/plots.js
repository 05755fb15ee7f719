// Draws losses from the JSON that the page holds, with what all plots share. Plotly is in the page.
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
  const rates = [...new Set(DATA.final.flatMap(v => v.points.map(p => p.lr)))].sort((a, b) => a - b);
  if (rates.length < 2) return drawFinalByVariant();
  byId('final-note').textContent = 'Lines join means over seeds of the runs that finished, bands '
    + 'reach from the least to the greatest seed, dots are seeds. Crosses above the dotted line '
    + 'stand for runs that diverged; their height means nothing.';
  const logY = byId('final-log-y').checked;
  const all = DATA.final.flatMap(v => v.points.flatMap(p => p.done));
  const low = Math.min(...all), high = Math.max(...all);
  const top = logY ? high * (high / low) ** 0.12 + 1e-6 : high + 0.12 * (high - low) + 1e-6;
  const step = logY ? (high / low) ** 0.05 : 0.05 * (high - low);
  const height = (n) => logY ? top * step ** n : top + step * n;
  const lost = DATA.final.flatMap((v, i) => v.points.filter(p => p.diverged).map(p => [i, p.lr]));
  const stacked = (i, lr) => height(lost.filter(([j, other]) => j < i && other === lr).length);
  const traces = DATA.final.flatMap((v, i) => finalTraces(v, i, stacked));
  const at = logY ? Math.log10(height(-0.6)) : height(-0.6);
  const line = {type: 'line', xref: 'paper', x0: 0, x1: 1, y0: height(-0.6), y1: height(-0.6),
    line: {color: '#b9bfc5', width: 1, dash: 'dot'}};
  const told = {text: 'diverged ↑', xref: 'paper', x: 0, y: at, xanchor: 'left', yanchor: 'bottom',
    showarrow: false, font: {size: 12, color: SOFT}};
  Plotly.react('final', traces, layout({
    height: heightOf('final', 440), legend: legendOf('final'), showlegend: DATA.final.length > 1,
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
  const traces = DATA.final.flatMap(v => {
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
  const bySeed = cells.some(c => c.color);  // of one variant alone
  const traces = [...(bySeed ? [] : DATA.variants.map(legendEntry)),
    ...cells.flatMap(c => cellTraces(c, tau))];
  const narrow = byId('curves').clientWidth < NARROW;
  const x = {type: byId('curves-log-x').checked ? 'log' : 'linear'};
  const y = {type: byId('curves-log-y').checked ? 'log' : 'linear'};
  const validated = DATA.cells.some(c => c.validation[0].length);
  const left = !validated ? [0, 1] : [0, 0.47], right = [0.55, 1];
  const domains = narrow && validated
    ? [[0, 1], [0.57, 1], [0, 1], [0, 0.42]] : [left, [0, 1], right, [0, 1]];
  Plotly.react('curves', traces, layout({
    height: narrow && validated ? 820 : heightOf('curves', 480), legend: legendOf('curves'),
    showlegend: several || bySeed,
    xaxis: axis('step', {...x, domain: domains[0], anchor: 'y'}),
    yaxis: axis('training loss, nats per token', {...y, domain: domains[1], anchor: 'x'}),
    ...(validated && {xaxis2: axis('step', {...x, domain: domains[2], anchor: 'y2'}),
      yaxis2: axis('validation loss, nats per token', {...y, domain: domains[3], anchor: 'x2'})}),
  }), CONFIG);
  if (byId('rates')) drawRates(cells, x);
}

// The learning rate at each step, of the runs whose losses are drawn.
function drawRates(cells, x) {
  const traces = cells.filter(c => c.rates[0].length).map(c => {
    const v = DATA.variants[c.variant], look = c.color ? c : v;
    return {x: c.rates[0], y: c.rates[1], mode: c.rates[0].length < 2 ? 'markers' : 'lines',
      line: {color: look.color, dash: PLOTLY_DASH[look.dash], width: 1.3}, opacity: 0.7,
      hovertemplate: `<b>${escape(v.name)}</b><br>step %{x:,}: %{y:.4g}<extra></extra>`};
  });
  Plotly.react('rates', traces, layout({height: 200, showlegend: false, xaxis: axis('step', x),
    yaxis: axis('learning rate', {rangemode: 'tozero'})}), CONFIG);
}

// What stands for a variant in the legend, also where its curves are drawn faintly.
function legendEntry(v, i) {
  return {x: [null], y: [null], mode: 'lines', name: escape(v.name), legendgroup: String(i),
    line: {color: v.color, dash: PLOTLY_DASH[v.dash], width: 2.5}};
}

function cellTraces(cell, tau) {
  const v = DATA.variants[cell.variant], name = escape(v.name);
  const strong = v.best_lr === null || v.best_lr === cell.lr;
  const look = cell.color ? cell : v, group = cell.color ? cell.cell : String(cell.variant);
  const line = {color: look.color, dash: PLOTLY_DASH[look.dash], width: strong ? 1.8 : 1};
  const head = `<b>${name}</b><br>learning rate ${cell.lr}, ${escape(cell.seed)}<br>`
    + `${cell.cell} (${cell.status})<br>step %{x:,}: %{y:.4f}<extra></extra>`;
  const traces = [];
  for (const [curve, suffix, values] of [[cell.training, '', smooth(cell.training, tau)],
    [cell.validation, '2', cell.validation[1]]]) {
    if (!curve[0].length) continue;
    const place = {xaxis: 'x' + suffix, yaxis: 'y' + suffix, legendgroup: group, showlegend: false,
      name: cell.color ? escape(cell.seed) : name, hovertemplate: head};
    const points = curve[0].length < 12 ? 'lines+markers' : 'lines';
    traces.push({...place, x: curve[0], y: values, mode: points, line, marker: {size: 4},
      opacity: strong ? 0.95 : 0.4, showlegend: Boolean(cell.color) && !suffix});
    const end = values.findLastIndex(value => value !== null);
    if (cell.status === 'diverged' && end >= 0) {
      traces.push({...place, x: [curve[0][end]], y: [values[end]], mode: 'markers',
        marker: {symbol: 'x', size: 9, color: look.color}});
    }
  }
  return traces;
}
