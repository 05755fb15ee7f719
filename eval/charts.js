// Draws the specifications that the page holds, each in the element of its name.
'use strict';

const {specs, light, dark} = JSON.parse(document.getElementById('charts').textContent);
const prefersDark = matchMedia('(prefers-color-scheme: dark)'), prints = matchMedia('print');

function drawAll() {
  const config = prefersDark.matches && !prints.matches ? dark : light;
  const actions = {export: true, source: false, compiled: false, editor: false};
  for (const [name, spec] of Object.entries(specs)) {
    vegaEmbed(document.getElementById(name), spec, {config, actions, renderer: 'svg'});
  }
}

prefersDark.addEventListener('change', drawAll);
prints.addEventListener('change', drawAll);
drawAll();
