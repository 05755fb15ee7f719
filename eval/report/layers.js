// What was recorded per layer, per head, and beside these of the whole model.

const KINDS = ['layers', 'heads', 'scalars'];
const seenOf = cell => KINDS.some(kind => Object.keys(cell[kind]).length);
const words = name => name.replaceAll('_', ' ');

// Means over seeds of each variant at its best learning rate, then single cells.
function layerChoices() {
  const choices = [];
  DATA.variants.forEach((v, i) => {
    const cells = DATA.cells.filter(c => c.variant === i && seenOf(c)
      && (v.best_lr === null || c.lr === v.best_lr));
    if (cells.length > 1) {
      choices.push({group: 'mean over seeds', cells,
        label: `${v.name}, learning rate ${cells[0].lr}, ${cells.length} runs`});
    }
  });
  for (const cell of DATA.cells.filter(seenOf)) {
    const label = `${DATA.variants[cell.variant].name}, learning rate ${cell.lr}, ${cell.seed}`;
    choices.push({group: 'one run', cells: [cell], label: `${label} (${cell.cell})`});
  }
  return choices;
}

// Of numbers, or of lists of them, place by place; null where one is missing.
function meanOf(values) {
  if (Array.isArray(values[0])) {
    return values[0].map((_, i) => meanOf(values.map(v => Array.isArray(v) ? v[i] : null)));
  }
  return values.some(value => value === null || value === undefined) ? null : mean(values);
}

// [steps, values at each] of the mean over cells, at the steps that all have.
function meanMap(cells, kind, name) {
  const maps = cells.filter(c => c[kind][name]).map(c => new Map(
    c[kind][name][0].map((step, i) => [step, c[kind][name][1][i]])));
  if (!maps.length) return [[], []];
  const steps = [...maps[0].keys()].filter(step => maps.every(m => m.has(step)));
  return [steps, steps.map(step => meanOf(maps.map(m => m.get(step))))];
}

// A layer's heads can be chosen where heads are drawn.
function fillLayers(count) {
  const select = byId('layers-layer'), before = select.value;
  byId('layers-heads').style.display = count ? '' : 'none';
  if (select.options.length === count) return;
  select.replaceChildren();
  fill(select, [...Array(count).keys()].map(l => ({value: l, label: l + 1})));
  if (Number(before) < count) select.value = before || 0;
}

function drawLayers(choices) {
  const {cells} = choices[Number(byId('layers-of').value)], log = byId('layers-log').checked;
  const {names} = DATA.quantities[Number(byId('layers-what').value)];
  const box = byId('layers');
  box.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.purge(plot));
  box.replaceChildren();
  const row = look => {
    const pair = box.appendChild(document.createElement('div'));
    pair.className = look;
    return [0, 1].map(() => pair.appendChild(document.createElement('div')));
  };
  // Of several quantities the heads of the first alone: the others are a choice away.
  const ofHeads = names.find(name => cells.some(c => c.heads[name]));
  fillLayers(ofHeads ? cells.find(c => c.heads[ofHeads]).heads[ofHeads][1][0].length : 0);
  for (const name of names) {
    const [steps, values] = meanMap(cells, 'layers', name);
    if (steps.length) {
      const [left, right] = row('pair');
      drawMap(left, name, steps, values, log);
      drawDepth(right, steps, values, log);
    }
    if (name === ofHeads) {
      const [left, right] = row('pair'), [at, heads] = meanMap(cells, 'heads', name);
      if (at.length) drawHeads(left, right, name, at, heads, log);
    }
  }
  const scalars = names.filter(name => cells.some(c => c.scalars[name]));
  for (let i = 0; i < scalars.length; i += 2) {
    const places = row(scalars.length > 1 ? 'pair halves' : 'pair');
    scalars.slice(i, i + 2).forEach((name, n) => drawScalar(places[n], name, cells, log));
  }
}

const PANEL = {height: 240, margin: {l: 50, r: 8, t: 34, b: 44}, showlegend: false};
const scaled = (log, more) => axis('', {type: log ? 'log' : 'linear', ...more});
const titled = text => ({text: escape(text), font: {size: 14}, x: 0.01, xanchor: 'left', y: 0.97});
const lineOf = (x, y, more) => ({x, y, mode: x.length < 12 ? 'lines+markers' : 'lines',
  marker: {size: 4}, line: {width: 1.6}, ...more});

// Rows of values over steps; `custom` has what the hover text says of each.
function drawHeat(place, title, steps, y, rows, custom, hover, log, more) {
  const shown = value => value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value;
  Plotly.newPlot(place, [{type: 'heatmap', x: steps.map(String), y, z: rows.map(row => row.map(shown)),
    customdata: custom, colorscale: 'Viridis', hovertemplate: hover + '<extra></extra>',
    colorbar: {thickness: 10, outlinewidth: 0, title: {text: log ? 'log10' : '', side: 'right'}}}],
  layout({...PANEL, title: titled(title),
    xaxis: axis('step', {type: 'category', nticks: 8, tickangle: 0}), ...more}), STILL);
}

// The heads of all layers over steps, and those of one as lines.
function drawHeads(left, right, name, steps, values, log) {
  const layer = Number(byId('layers-layer').value);
  const heads = values[0].flatMap((own, l) => own.map((_, n) => [l, n]));
  drawHeat(left, `${words(name)}, each head`, steps, heads.map((_, i) => i),
    heads.map(([l, n]) => values.map(at => at[l][n])),
    heads.map(([l, n]) => values.map(at => [l + 1, n + 1, at[l][n]])),
    'step %{x}, layer %{customdata[0]}, head %{customdata[1]}<br>%{customdata[2]:.4g}', log,
    {height: Math.min(560, Math.max(240, 90 + 9 * heads.length)),
      yaxis: axis('heads of layer', {tickvals: values[0].map((own, l) => l * own.length
        + (own.length - 1) / 2), ticktext: values[0].map((_, l) => l + 1)})});
  const traces = (values[0][layer] || []).map((_, n) => lineOf(steps, values.map(at => at[layer][n]),
    {name: `head ${n + 1}`, hovertemplate: `head ${n + 1}, step %{x}<br>%{y:.4g}<extra></extra>`}));
  Plotly.newPlot(right, traces, layout({...PANEL, height: 280, showlegend: traces.length < 9,
    legend: {font: {size: 10}}, title: titled(`heads of layer ${layer + 1}`), xaxis: axis('step'),
    yaxis: scaled(log)}), STILL);
}

// A line for each run.
function drawScalar(place, name, cells, log) {
  const color = cells.length > 1 ? undefined : '#0072b2';
  const traces = cells.filter(c => c.scalars[name]).map(c => lineOf(...c.scalars[name], {name: c.seed,
    line: {width: 1.6, color}, hovertemplate: `${escape(c.seed)}, step %{x}<br>%{y:.4g}<extra></extra>`}));
  Plotly.newPlot(place, traces, layout({...PANEL, title: titled(words(name)), xaxis: axis('step'),
    yaxis: scaled(log)}), STILL);
}

function drawMap(place, name, steps, values, log) {
  const depths = values[0].map((_, l) => l + 1);
  const rows = depths.map(l => values.map(row => row[l - 1]));
  drawHeat(place, words(name), steps, depths, rows, rows,
    'step %{x}, layer %{y}<br>%{customdata:.4g}', log,
    {yaxis: axis('layer', {dtick: Math.ceil(depths.length / 8)})});
}

function drawDepth(place, steps, values, log) {
  const ends = steps.length > 1 ? [0, steps.length - 1] : [0];
  const traces = ends.map((i, n) => ({x: values[i].map((_, l) => l + 1), y: values[i],
    mode: 'lines+markers', name: `step ${steps[i].toLocaleString('en')}`,
    line: {color: n ? '#0072b2' : '#9aa2aa', width: 2}, marker: {size: 6},
    hovertemplate: 'layer %{x}<br>%{y:.4g}'}));
  Plotly.newPlot(place, traces, layout({...PANEL, showlegend: true,
    xaxis: axis('layer', {dtick: Math.ceil(values[0].length / 8)}), yaxis: scaled(log)}), STILL);
}
