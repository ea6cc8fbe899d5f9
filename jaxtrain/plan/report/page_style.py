"""What the page of a plan adds to the report's style sheet, and its script."""

STYLE = """
p { margin: .4rem 0; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 1.2rem; } li { margin: .25rem 0; overflow-wrap: anywhere; }
.unit { color: var(--soft); font-size: .82rem; margin: .1rem 0 .5rem; }
.cards div { min-width: 0; overflow-wrap: anywhere; }
.verdicts { list-style: none; padding: 0; margin-top: 1rem; }
.legend {
  list-style: none; padding: 0; margin: .5rem 0 0; font-size: .85rem;
  display: flex; flex-wrap: wrap; gap: .15rem 1.1rem;
}
.legend li { display: flex; gap: .45rem; align-items: baseline; margin: 0; min-width: 0; }
.legend i { flex: none; }
.swatch {
  display: inline-block; width: 1.1rem; height: .75rem; border-radius: 2px; background: var(--c, var(--soft));
  align-self: center;
}
.swatch.line, .capacity { background: var(--bad); }
.swatch.line { width: 3px; height: 1rem; margin: 0 .45rem; }
.assumed, .segment {
  background: color-mix(in srgb, var(--c) 55%, transparent); border: 1px dashed var(--c);
}
.striped {
  --pale: color-mix(in srgb, var(--c) 70%, transparent);
  background: repeating-linear-gradient(45deg, var(--pale) 0 4px, transparent 4px 8px);
}
.compiled { background: var(--ink); }
.reserved { background: repeating-linear-gradient(135deg, var(--line) 0 3px, transparent 3px 7px); }
.bar { margin: .8rem 0; } .bar p { margin: 0 0 .2rem; font-size: .92rem; }
.track { position: relative; height: 1.7rem; background: var(--panel); border-radius: 3px; overflow: hidden; }
.track.thin { height: .8rem; margin-top: 3px; }
.track span { position: absolute; top: 0; bottom: 0; }
.capacity { width: 3px; margin-left: -3px; }
.whisker, .swatch.range { position: relative; height: .9rem; }
.whisker span { position: absolute; top: .4rem; border-top: 2px dashed var(--ink); }
.whisker span::before, .whisker span::after {
  content: ""; position: absolute; top: -.35rem; height: .6rem; border-left: 2px solid var(--ink);
}
.whisker span::before { left: 0; } .whisker span::after { right: 0; }
.whisker i, .mark {
  width: .75rem; height: .75rem; border-radius: 50%; background: var(--page); border: 2px solid var(--ink);
}
.whisker i { position: absolute; top: .05rem; margin-left: -.37rem; }
.swatch.range { background: none; border-top: 2px dashed var(--ink); height: 0; width: 1.4rem; border-radius: 0; }
.mark { display: inline-block; align-self: center; }
.mark.diamond { border-radius: 0; transform: rotate(45deg) scale(.8); }
.axis { position: relative; height: 1.3rem; border-top: 1px solid var(--line); font-size: .8rem; color: var(--soft); }
.axis span { position: absolute; top: .1rem; transform: translateX(-50%); white-space: nowrap; }
.axis span:first-child { transform: none; } .axis span.last { transform: translateX(-100%); }
.number {
  font-style: normal; font-size: .75rem; min-width: 1.3rem; text-align: center; border: 2px solid var(--c);
  border-radius: 1rem; line-height: 1.1rem; align-self: flex-start; margin-top: .1rem;
}
.plots .legend, .wide-plot + .legend { flex-direction: column; }
.wide-plot { max-width: 36rem; }
svg text { font-size: 12.5px; fill: var(--ink); }
svg .grid { stroke: var(--line); } svg .ridge { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .roof { fill: none; stroke: var(--ink); stroke-width: 1.6; }
svg .point { fill: var(--page); stroke-width: 2.2; } svg .leader { fill: none; opacity: .7; }
svg .span { fill: none; stroke-width: 1.8; stroke-dasharray: 5 4; }
.hosts { display: flex; flex-wrap: wrap; gap: .45rem; margin: .6rem 0; }
.host { border: 1.5px solid var(--soft); border-radius: .5rem; padding: .3rem; max-width: 100%; }
.host > span { display: block; font-size: .78rem; color: var(--soft); margin-bottom: .2rem; }
.cells { display: grid; grid-template-columns: repeat(var(--n), auto); gap: 3px; }
.cell {
  min-width: 1.7rem; padding: .1rem .15rem; text-align: center; font-size: .74rem; border-radius: 3px;
  font-variant-numeric: tabular-nums; border: 1.5px solid var(--c, var(--soft));
  background: color-mix(in srgb, var(--c, transparent) 30%, transparent);
}
.mesh-axes { margin: .8rem 0 .3rem; }
.mesh-axis {
  display: grid; grid-template-columns: 6.5rem 10.5rem 1fr; gap: .2rem 1rem; padding: .5rem 0;
  border-top: 1px solid var(--line); font-size: .9rem;
}
.mesh-axis p { margin: 0 0 .15rem; }
svg.small { max-width: 100%; }
.small .outline { fill: none; stroke: var(--soft); } .small .filled { fill: var(--series-1); }
.wide { overflow-x: auto; }
.wide table { width: auto; min-width: 60%; }
.wide th, .wide td { width: auto; padding-right: 1.4rem; min-width: 8rem; max-width: 24rem; }
.wide th { min-width: 11rem; }
.wide thead th, .wide .section { color: var(--ink); font-weight: 600; }
.wide .section { padding-top: 1.1rem; }
.wide .share { text-align: right; min-width: 3.5rem; padding-right: 0; white-space: nowrap; }
.candidates { margin: .5rem 0 .7rem; } .candidates table { width: 100%; }
.candidates th, .candidates td { min-width: 0; padding-right: .9rem; white-space: nowrap; }
.candidates td:nth-child(2) { min-width: 17rem; white-space: normal; }
.candidates tr.chosen { background: var(--panel); } .candidates tr.over td { color: var(--soft); }
.meter {
  display: inline-block; width: 4.5rem; height: .6rem; margin: 0 .35rem; background: var(--line); border-radius: 2px;
}
.meter i { display: block; height: 100%; background: var(--series-1); border-radius: 2px; }
.meter.over i { background: var(--bad); }
details { margin: .5rem 0; } summary { cursor: pointer; margin-bottom: .4rem; overflow-wrap: anywhere; }
#tip {
  position: fixed; z-index: 9; max-width: min(20rem, 90vw); padding: .3rem .6rem; border-radius: .35rem;
  background: var(--ink); color: var(--page); font-size: .82rem; pointer-events: none;
}
@media (max-width: 40rem) {
  .mesh-axis { grid-template-columns: 1fr; }
  .candidates td:nth-child(2) { min-width: 11rem; }
  .wide th { min-width: 7rem; } .wide td { min-width: 6rem; padding-right: .8rem; }
}
@media print { .track, .cell, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

# Shows the words of the element under the pointer at once; without it a browser shows them after a moment.
SCRIPT = """
(function () {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.querySelectorAll("[title]").forEach(function (one) {
    one.dataset.tip = one.title;
    one.removeAttribute("title");
  });
  document.querySelectorAll("svg title").forEach(function (one) {
    one.parentNode.dataset.tip = one.textContent;
    one.parentNode.setAttribute("aria-label", one.textContent);
    one.remove();
  });
  document.addEventListener("pointerover", function (event) {
    const over = event.target.closest("[data-tip]");
    tip.hidden = !over;
    if (over) tip.textContent = over.dataset.tip;
  });
  document.addEventListener("pointermove", function (event) {
    const left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const isLow = below + tip.offsetHeight > window.innerHeight;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (isLow ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  });
})();
"""
