// Paired differences from the baseline, from the best to the worst, in the colour of the verdict.

function drawDifferences() {
  const found = DATA.differences, names = found.map(d => inLines(d.name));
  const unit = DATA.unit.replace('loss, ', '');
  const traces = found.map((d, i) => ({x: [d.mean], y: [names[i]], mode: 'markers', name: names[i],
    marker: {color: d.half === null ? '#fff' : d.color, size: 8, line: {color: d.color, width: 2}},
    error_x: {type: 'data', array: [d.half || 0], color: d.color, thickness: 2, width: 5},
    hovertemplate: `<b>${escape(d.name)}</b><br>%{x:+.4f}`
      + (d.half === null ? '' : ` ± ${d.half.toFixed(4)}`)
      + `, ${d.seeds} seed${d.seeds === 1 ? '' : 's'}<br>${d.told}<extra></extra>`}));
  const ends = found.flatMap(d => [d.mean - (d.half || 0), d.mean + (d.half || 0)]);
  const low = Math.min(0, ...ends), high = Math.max(0, ...ends), room = 0.05 * (high - low) || 1;
  const rows = names.reduce((sum, name) => sum + 12 + 17 * name.split('<br>').length, 0);
  Plotly.react('differences', traces, layout({height: Math.max(190, 90 + rows), showlegend: false,
    margin: {l: 60, r: 40, t: 8, b: 48},
    xaxis: axis(`difference from ${escape(DATA.baseline)}, ${unit}`,
      {zeroline: true, zerolinecolor: INK, zerolinewidth: 1.5,
        range: [low - room, high + room]}),
    yaxis: axis('', {type: 'category', autorange: 'reversed', tickfont: {color: INK}})}), CONFIG);
}

// Long names in lines, between their parts.
function inLines(name) {
  const lines = [''];
  for (const part of escape(name).split(', ')) {
    const longer = lines.at(-1) ? `${lines.at(-1)}, ${part}` : part;
    if (lines.at(-1) && longer.length > 34) lines.push(part);
    else lines[lines.length - 1] = longer;
  }
  return lines.join(',<br>');
}
