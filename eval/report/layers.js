// What was recorded per layer.

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
