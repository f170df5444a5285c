"use strict";
// Draws the page's charts as they come near, in the theme of the moment. Figures name colours as "@name": the CSS
// variable of that name, so that page and charts have one palette.
(() => {
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".chart")];
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const drawn = new Set();

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

  async function draw(chart) {
    library = library || unpack();
    await library;
    const spec = painted(JSON.parse(document.getElementById(chart.id.replace("chart-", "spec-")).textContent));
    if (!drawn.has(chart)) chart.textContent = "";
    await Plotly.react(chart, spec.data, { ...spec.layout, template: template() }, config);
    drawn.add(chart);
    chart.dataset.drawn = String(spec.data.length);
    root.dataset.drawn = String(drawn.size);
  }

  const attempt = (list) => Promise.all(list.map(draw)).catch(problem);
  const redraw = () => attempt([...drawn]);

  const near = new IntersectionObserver((entries) => {
    const arrived = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    arrived.forEach((chart) => near.unobserve(chart));
    if (arrived.length) attempt(arrived);
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
})();
