"""Style sheet and script of the page."""

STYLE = """
:root{--paper:#ffffff;--ink:#1f2328;--faint:#66707a;--line:#d9dee3;--card:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e4e8ec;--faint:#99a3ad;
--line:#343b43;--card:#1c2126}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.6rem;line-height:1.2;margin:.2em 0}
h2{font-size:1.15rem;margin:2.2em 0 .4em}
h3{font-size:.9rem;margin:0 0 2px;font-weight:600}
.answer{font-size:1.05rem;margin:.4em 0}
.question{font-size:1.05rem;color:var(--faint);margin:.2em 0 .6em}
.large{height:340px}
.detail{font-size:.86rem;overflow-wrap:anywhere}
a{color:inherit}
code{font-size:.85em;overflow-wrap:anywhere}
.count,.facts,.caption{color:var(--faint);font-size:.86rem;margin:.3em 0}
.plot{width:100%}
.tall{height:min(620px,max(430px,72vw))}
.small{height:250px}
.low{height:150px}
.medium{height:300px}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:18px}
.scroll{overflow-x:auto;margin:.6em 0}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums}
table.wide{min-width:100%}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--faint);font-weight:500}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
table.narrow td{white-space:normal;overflow-wrap:anywhere}
table.narrow td+td{text-align:left}
table.narrow td:first-child{white-space:nowrap;vertical-align:top}
@media (max-width:600px){table.wide td:first-child{white-space:normal;min-width:9.5em}
th,td{padding:5px 7px}}
ul{padding-left:1.2em;font-size:.92rem}
li{margin:.3em 0;overflow-wrap:anywhere}
"""

SCRIPT = """
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function colors() {
    var style = getComputedStyle(document.documentElement);
    function read(name) { return style.getPropertyValue(name).trim(); }
    return {INK: read("--ink"), FAINT: read("--faint"), PAPER: read("--paper"),
      LINE: read("--line")};
  }
  function fill(value, palette) {
    if (typeof value === "string") { return palette[value] || value; }
    if (Array.isArray(value)) { return value.map(function (v) { return fill(v, palette); }); }
    if (value && typeof value === "object") {
      var copy = {};
      Object.keys(value).forEach(function (k) { copy[k] = fill(value[k], palette); });
      return copy;
    }
    return value;
  }
  function axis(own, palette) {
    return Object.assign({gridcolor: palette.LINE, linecolor: palette.FAINT, zeroline: false,
      ticks: "outside", tickcolor: palette.LINE, automargin: true}, own || {});
  }
  function layout(own, palette) {
    var base = Object.assign({margin: {l: 56, r: 12, t: 26, b: 46}, showlegend: false,
      hovermode: "closest", legend: {orientation: "h", y: 1, yanchor: "bottom", x: 0}}, own);
    base.paper_bgcolor = palette.PAPER;
    base.plot_bgcolor = palette.PAPER;
    base.font = {color: palette.INK, size: 12};
    base.xaxis = axis(own.xaxis, palette);
    base.yaxis = axis(own.yaxis, palette);
    base.hoverlabel = {bgcolor: palette.PAPER, bordercolor: palette.FAINT,
      font: {color: palette.INK}, align: "left"};
    return base;
  }
  function covered(a, b) {
    var w = Math.min(a[2], b[2]) - Math.max(a[0], b[0]);
    var h = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
    return w > 0 && h > 0 ? w * h / ((a[2] - a[0]) * (a[3] - a[1])) + 0.2 : 0;
  }
  function away(box, p) {
    return Math.hypot(Math.max(box[0] - p[0], 0, p[0] - box[2]),
      Math.max(box[1] - p[1], 0, p[1] - box[3]));
  }
  // Labels try places on rings round their point, front members first; one that finds no free
  // place is left to the hover text and the table.
  function place(plot, labels, lines, palette) {
    var full = plot._fullLayout, xa = full.xaxis, ya = full.yaxis;
    var pen = document.createElement("canvas").getContext("2d");
    var size = xa._length < 500 ? 10.5 : 12, height = size + 4;
    pen.font = size + "px sans-serif";
    var points = labels.map(function (l) { return [xa.d2p(l.x), ya.d2p(l.y)]; });
    var marks = points.map(function (p) { return [p[0] - 7, p[1] - 7, p[0] + 7, p[1] + 7]; });
    (lines || []).forEach(function (line) {
      for (var i = 1; i < line.length; i += 1) {
        var a = [xa.d2p(line[i - 1][0]), ya.d2p(line[i - 1][1])];
        var b = [xa.d2p(line[i][0]), ya.d2p(line[i][1])];
        marks.push([Math.min(a[0], b[0]) - 1, Math.min(a[1], b[1]) - 1,
          Math.max(a[0], b[0]) + 1, Math.max(a[1], b[1]) + 1]);
      }
    });
    var taken = [], notes = [], rings = [0.5, 1, 1.8, 2.8, 4, 5.5, 7.5];
    labels.forEach(function (label, index) {
      var p = points[index], width = pen.measureText(label.text).width + 6, best = null;
      if (p[0] < 0 || p[1] < 0 || p[0] > xa._length || p[1] > ya._length) { return; }
      rings.forEach(function (ring) {
        for (var step = 0; step < 16; step += 1) {
          var c = Math.cos(step * Math.PI / 8), s = Math.sin(step * Math.PI / 8);
          var x = p[0] + ring * height * c + c * width / 2;
          var y = p[1] - ring * height * s - s * height / 2;
          var box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2];
          if (box[0] < 0 || box[1] < 0 || box[2] > xa._length || box[3] > ya._length) { continue; }
          if (taken.some(function (t) { return covered(box, t) > 0; })) { continue; }
          var cost = ring + 0.15 * (1 - c);
          marks.forEach(function (m) { cost += 8 * covered(box, m); });
          var own = away(box, p);
          points.forEach(function (q, other) {
            if (other !== index && away(box, q) <= own) { cost += 3; }
          });
          if (!best || cost < best.cost) { best = {cost: cost, box: box, x: x, y: y, own: own}; }
        }
      });
      if (!best || (label.rank > 0 && best.cost > (xa._length < 500 ? 5 : 12))) { return; }
      taken.push(best.box);
      notes.push({x: label.x, y: label.y, text: label.text,
        font: {size: size, color: label.ink ? label.ink[dark.matches ? 1 : 0] : palette.INK},
        ax: best.x - p[0], ay: best.y - p[1], axref: "pixel", ayref: "pixel",
        bgcolor: palette.PAPER + "b8", showarrow: true, arrowhead: 0, arrowwidth: 1,
        borderpad: 0, standoff: 7,
        arrowcolor: best.own > height * 0.9 ? palette.FAINT : "rgba(0,0,0,0)"});
      if (full.xaxis.type === "log") { notes[notes.length - 1].x = Math.log10(label.x); }
    });
    return notes;
  }
  function label(plot, figure, palette) {
    if (!figure.labels) { return; }
    var fixed = fill(figure.layout.annotations || [], palette);
    plot._placing = true;
    var own = place(plot, figure.labels, figure.lines, palette);
    Plotly.relayout(plot, {annotations: fixed.concat(own)})
      .then(function () { plot._placing = false; });
  }
  // A click on a mark writes its runs under the figure, with links to their folders and to MLflow.
  function detail(plot, figure) {
    var box = document.getElementById(plot.id + "-detail");
    if (!box) { return; }
    plot.on("plotly_click", function (event) {
      var point = event.points[0], data = point && point.customdata;
      if (!data) { return; }
      box.textContent = "cell " + data.cell + ": ";
      data.runs.forEach(function (run, index) {
        var item = document.createElement(figure.links ? "a" : "span");
        if (figure.links) { item.href = figure.links + "/" + encodeURIComponent(run[1]) + "/"; }
        item.textContent = "seed " + run[0] + " (" + run[1] + ")";
        box.append(index ? ", " : "", item);
        if (run[2]) {
          var page = document.createElement("a");
          page.href = run[2];
          page.target = "_blank";
          page.rel = "noopener";
          page.textContent = "MLflow";
          box.append(" · ", page);
        }
      });
    });
  }
  function draw(name) {
    var plot = document.getElementById(name), figure = figures[name], palette = colors();
    if (figure.height) { plot.style.height = figure.height + "px"; }
    Plotly.react(plot, fill(figure.data, palette), layout(fill(figure.layout, palette), palette),
      {responsive: true, displaylogo: false, displayModeBar: false}).then(function () {
      label(plot, figure, palette);
      if (!plot._watched) {
        plot._watched = true;
        detail(plot, figure);
        plot.on("plotly_relayout", function () {
          if (!plot._placing) { label(plot, figure, colors()); }
        });
      }
    });
  }
  var seen = {};
  var watch = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.isIntersecting && !seen[entry.target.id]) {
        seen[entry.target.id] = true;
        draw(entry.target.id);
      }
    });
  }, {rootMargin: "600px"});
  Object.keys(figures).forEach(function (name) { watch.observe(document.getElementById(name)); });
  dark.addEventListener("change", function () { Object.keys(seen).forEach(draw); });
  var timer = null, width = window.innerWidth;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) { return; }
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(function () { Object.keys(seen).forEach(draw); }, 200);
  });
}());
"""
