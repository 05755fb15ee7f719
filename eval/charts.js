// Draws the specifications that the page holds, each in the element of its name.
'use strict';

const charts = (() => {
  const {specs, light, dark} = JSON.parse(document.getElementById('charts').textContent);
  const prefersDark = matchMedia('(prefers-color-scheme: dark)');
  const views = {};  // name -> Vega's view, once it is drawn

  async function draw(name, spec = specs[name]) {
    const place = document.getElementById(name);
    if (!place) return;
    specs[name] = spec;
    views[name]?.finalize();
    const actions = {export: true, source: false, compiled: false, editor: false};
    const config = prefersDark.matches && !matchMedia('print').matches ? dark : light;
    const {view} = await vegaEmbed(place, spec, {config, actions, renderer: 'svg'});
    views[name] = view;
  }

  const drawAll = () => Promise.all(Object.keys(specs).map(name => draw(name)));
  prefersDark.addEventListener('change', drawAll);
  matchMedia('print').addEventListener('change', drawAll);
  return {draw, drawAll, specs, views};
})();
charts.drawAll();
