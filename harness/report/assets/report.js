"use strict";
// Draws the page's charts as they come near, in the theme of the moment, without the arms that are filtered out.
// Figures name colours as "@name": the CSS variable of that name, so that page and charts have one palette.
const figures = (() => {
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".chart")];
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const drawn = new Set();
  let hidden = new Set(); // indices of arms
  let against = null; // an arm's ratio to the baseline that the reader chose, by a quantity

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  function painted(node, key = "") {
    if (Array.isArray(node)) return node.map((item) => painted(item, key));
    if (node && typeof node === "object")
      return Object.fromEntries(Object.entries(node).map(([name, item]) => [name, painted(item, name)]));
    return typeof node === "string" && node.startsWith("@") && /color$/.test(key) ? colour(node.slice(1)) : node;
  }

  function template() {
    const axis = {
      gridcolor: colour("grid"), linecolor: colour("muted"), zerolinecolor: colour("line"), tickcolor: colour("muted"),
      title: { font: { size: 12, color: colour("soft") }, standoff: 8 }, automargin: true, zeroline: false,
    };
    return {
      layout: {
        paper_bgcolor: colour("paper"), plot_bgcolor: colour("paper"), xaxis: axis, yaxis: axis,
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
        margin: { l: 58, r: 14, t: 24, b: 46 }, annotationdefaults: { font: { size: 12, color: colour("ink") } },
        hoverlabel: { font: { size: 12 }, bgcolor: colour("panel"), bordercolor: colour("line") },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("ink") },
        legend: { font: { size: 12 } }, hoverdistance: 30,
      },
    };
  }

  // --- filtering: `meta`, written by compare_filter.py, says whose a figure's parts are -------------------------------

  const shown = (arms) => !arms?.length || arms.some((arm) => !hidden.has(arm)); // nobody's: always

  // Every list of that length keeps these places only.
  function take(node, length, kept) {
    if (Array.isArray(node)) return node.length === length ? kept.map((i) => node[i]) : node;
    if (node && typeof node === "object")
      return Object.fromEntries(Object.entries(node).map(([name, item]) => [name, take(item, length, kept)]));
    return node;
  }

  const places = (owners) => owners.flatMap((arms, i) => (shown(arms) ? [i] : []));

  function keepRows(data, layout, { rows, row_px }) {
    const kept = places(rows), { yaxis } = layout, numbers = kept.map((_, i) => i);
    return {
      data: kept.length ? data.map((trace) => ({ ...take(trace, rows.length, kept), y: numbers })) : [],
      layout: {
        ...layout, height: layout.height - row_px * (rows.length - kept.length),
        yaxis: { ...yaxis, tickvals: numbers, ticktext: kept.map((i) => yaxis.ticktext[i]), range: [kept.length - 0.5, -0.5] },
      },
    };
  }

  // Panels lie above one another; what is left moves up by the height of those that went.
  function keepPanels(data, layout, panels) {
    const axis = (i) => "y" + (i ? i + 1 : ""), key = (i) => axis(i).replace("y", "yaxis");
    const inner = layout.height - layout.margin.t - layout.margin.b, kept = places(panels);
    const ends = panels.map((_, i) => layout[key(i)].domain[0] * inner);
    const heights = ends.map((end, i) => (i ? ends[i - 1] : inner) - end);
    const lost = heights.reduce((total, height, i) => total + (kept.includes(i) ? 0 : height), 0), left = inner - lost;
    const axes = kept.map(axis), moved = { ...layout, height: layout.height - lost, annotations: [] };
    let above = 0;
    panels.forEach((_, i) => {
      if (!kept.includes(i)) {
        above += heights[i];
        delete moved[key(i)];
        return;
      }
      const place = (share) => Math.min(1, Math.max(0, (share * inner - lost + above) / left));
      moved[key(i)] = { ...layout[key(i)], domain: layout[key(i)].domain.map(place) };
      moved.annotations.push({ ...layout.annotations[i], y: place(layout.annotations[i].y) });
    });
    if (layout.shapes) moved.shapes = layout.shapes.filter((shape) => axes.includes(shape.yref));
    if (axes.length) moved.xaxis = { ...layout.xaxis, anchor: axes[axes.length - 1] };
    return { data: data.filter((trace) => axes.includes(trace.yaxis || "y")), layout: moved };
  }

  // A trace of ratios, a point an arm, told against the chosen baseline.
  function rebased(trace) {
    const { follows, points } = trace.meta ?? {};
    if (!follows || !against) return trace;
    const found = points.map((arm) => against(follows, arm));
    const array = found.map(({ median, high }) => (high === null ? null : high - median));
    const arrayminus = found.map(({ median, low }) => (low === null ? null : median - low));
    return { ...trace, x: found.map(({ median }) => median), error_x: { ...trace.error_x, array, arrayminus } };
  }

  // From points in the order of x to the staircase under which all of them lie: its corners are those that none beats.
  function frontier(trace) {
    if (!trace.meta?.frontier) return trace;
    const x = [], y = [];
    for (let i = trace.x.length - 1; i >= 0; i -= 1)
      if (!(trace.y[i] <= y[0])) {
        x.unshift(trace.x[i]);
        y.unshift(trace.y[i]);
      }
    return trace.x.length < 2 ? { ...trace, x: [], y: [] } : { ...trace, x: [0, ...x, x[x.length - 1]], y: [y[0], ...y, 0] };
  }

  // What is left of a figure; null if nothing is. Plotly never sees `meta`, which it would read as a template's source.
  function filtered({ data, layout: { meta = {}, ...layout } }) {
    data = data.map(rebased);
    if (hidden.size) {
      if (meta.arrows) layout.annotations = layout.annotations.filter((_, i) => meta.arrows[i].every((arms) => shown(arms)));
      if (meta.rows) ({ data, layout } = keepRows(data, layout, meta));
      if (meta.panels) ({ data, layout } = keepPanels(data, layout, meta.panels));
      data = data.filter((trace) => shown(trace.meta?.arms)).map((trace) => {
        const points = trace.meta?.points;
        return points ? take(trace, points.length, places(points.map((arm) => [arm]))) : trace;
      });
      if (!data.some((trace) => trace.x.length)) return null;
    }
    return { data: data.map(frontier).map(({ meta: _, ...trace }) => trace), layout };
  }

  function problem(error) {
    const box = document.getElementById("problem");
    box.hidden = false;
    box.textContent = "Charts cannot be drawn here (" + error.message + "). Every number is in the table under its chart.";
    root.dataset.problem = error.message;
  }

  let library = null;
  async function unpack() {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream");
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not start");
  }

  const specOf = (chart) => document.getElementById(chart.id.replace("chart-", "spec-")).textContent;

  async function draw(chart) {
    library = library || unpack();
    await library;
    const spec = filtered(painted(JSON.parse(specOf(chart))));
    chart.closest("figure").hidden = spec === null;
    chart.querySelector(".pending")?.remove();
    drawn.add(chart);
    if (spec) {
      chart.style.height = spec.layout.height + "px";
      await Plotly.react(chart, spec.data, { ...spec.layout, template: template() }, config);
    }
    chart.dataset.drawn = String(spec ? spec.data.length : 0);
    root.dataset.drawn = String(drawn.size);
  }

  const attempt = (list) => Promise.all(list.map(draw)).catch(problem);
  const appearance = () => [root.dataset.theme, ...hidden].join();
  let shownAs = appearance();

  function redraw() {
    shownAs = appearance();
    return attempt([...drawn]);
  }

  // One after the other, so that the first can be seen while the next one is drawn.
  async function drawInTurn(list) {
    for (const chart of list) {
      await attempt([chart]);
      await new Promise((done) => setTimeout(done));
      if (root.dataset.drawn === "1") performance.mark("first chart");
    }
  }

  const near = new IntersectionObserver((entries) => {
    const arrived = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    arrived.forEach((chart) => near.unobserve(chart));
    drawInTurn(arrived);
  }, { rootMargin: "500px" });
  charts.forEach((chart) => near.observe(chart));

  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => attempt(charts.filter((chart) => !drawn.has(chart))));

  return {
    // Another baseline alone is told in those charts that compare with it.
    show(without, compared) {
      hidden = without;
      against = compared;
      if (appearance() !== shownAs) return redraw();
      return attempt([...drawn].filter((chart) => specOf(chart).includes('"follows"')));
    },
  };
})();
