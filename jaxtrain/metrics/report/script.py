"""The page's script: values of the curves where the pointer is. Without it, titles of the pictures give the values."""

SCRIPT = """
(function () {
  'use strict';
  function shown(v) {
    var a = Math.abs(v);
    if (a >= 1e9) return (v / 1e9).toPrecision(4) + 'B';
    if (a >= 1e6) return (v / 1e6).toPrecision(4) + 'M';
    if (a >= 1e4) return Math.round(v).toLocaleString('en');
    return a && a < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  }
  function nearest(steps, step) {
    var low = 0, high = steps.length - 1;
    while (high - low > 1) {
      var middle = (low + high) >> 1;
      if (steps[middle] > step) high = middle; else low = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  }
  document.querySelectorAll('svg[data-plot]').forEach(function (svg) {
    var plot = JSON.parse(svg.getAttribute('data-plot')), box = plot.box;
    plot.curves.forEach(function (curve) {
      var even = curve.s;
      if (Array.isArray(even)) return;
      curve.s = [];
      for (var i = 0; i < even.n; i++) curve.s.push(even.a + i * even.d);
    });
    var hits = svg.querySelector('.hits');
    if (hits) hits.remove();
    var mark = document.createElementNS(svg.namespaceURI, 'g');
    mark.setAttribute('class', 'mark');
    svg.appendChild(mark);
    var tip = document.createElement('div');
    tip.className = 'tip';
    tip.hidden = true;
    document.body.appendChild(tip);
    function y(value) {
      var to = plot.log ? Math.log(value) : value, a = plot.log ? Math.log(plot.y[0]) : plot.y[0];
      var b = plot.log ? Math.log(plot.y[1]) : plot.y[1];
      return box[3] - (to - a) / (b - a) * (box[3] - box[1]);
    }
    function x(step) { return box[0] + (step - plot.x[0]) / (plot.x[1] - plot.x[0]) * (box[2] - box[0]); }
    function draw(name, values) {
      var one = document.createElementNS(svg.namespaceURI, name);
      for (var key in values) one.setAttribute(key, values[key]);
      mark.appendChild(one);
    }
    function hide() { tip.hidden = true; mark.replaceChildren(); }
    function move(event) {
      var place = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / place.width;
      var at = (event.clientX - place.left) * scale;
      if (at < box[0] - 8 || at > box[2] + 8) return hide();
      var wanted = plot.x[0] + (at - box[0]) / (box[2] - box[0]) * (plot.x[1] - plot.x[0]);
      var best = null;
      plot.curves.forEach(function (curve) {
        var step = curve.s[nearest(curve.s, wanted)];
        if (best === null || Math.abs(step - wanted) < Math.abs(best - wanted)) best = step;
      });
      mark.replaceChildren();
      tip.replaceChildren();
      var head = document.createElement('b');
      head.textContent = 'step ' + Math.round(best).toLocaleString('en');
      tip.appendChild(head);
      draw('line', {x1: x(best), x2: x(best), y1: box[1], y2: box[3]});
      plot.curves.forEach(function (curve) {
        var i = nearest(curve.s, best), near = Math.abs(curve.s[i] - best) <= Math.max(plot.near, 0.5);
        if (!near) return;
        var line = document.createElement('div'), key = document.createElement('i');
        key.style.background = 'var(--series-' + curve.c + ')';
        line.appendChild(key);
        var said = curve.n + ' ' + shown(curve.v[i]);
        if (curve.l) said += ' (' + shown(curve.l[i]) + ' to ' + shown(curve.h[i]) + ')';
        if (Math.round(curve.s[i]) !== Math.round(best)) said += ', step ' + Math.round(curve.s[i]);
        line.appendChild(document.createTextNode(said));
        tip.appendChild(line);
        if (!plot.log || curve.v[i] > 0) {
          draw('circle', {cx: x(curve.s[i]), cy: y(curve.v[i]), r: 3.5, style: 'fill:var(--series-' + curve.c + ')'});
        }
      });
      tip.hidden = false;
      var wide = tip.offsetWidth, left = event.clientX + 14;
      if (left + wide > document.documentElement.clientWidth - 4) left = event.clientX - wide - 14;
      tip.style.left = Math.max(4, left) + window.scrollX + 'px';
      tip.style.top = event.clientY + window.scrollY + 12 + 'px';
    }
    svg.addEventListener('pointermove', move);
    svg.addEventListener('pointerdown', move);
    svg.addEventListener('pointerleave', hide);
  });
})();
"""
