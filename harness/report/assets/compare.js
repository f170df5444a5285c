// Compare mode: ratios to another baseline, and only some of the arms. The address keeps both, and the theme.
// The ratios are derived here from the trials' own values, by the rules of harness/statistics.py.
(() => {
  const source = document.getElementById("trials");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const root = document.documentElement, form = document.getElementById("compare");
  const names = data.arms.map((arm) => arm.name);
  const choice = form.elements.baseline, boxes = [...form.querySelectorAll("input[type=checkbox]")];
  const state = { baseline: data.baseline, hidden: new Set() };
  const MISSING = "\u2013";

  // --- statistics ---------------------------------------------------------------------------------------------------

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function median(values) {
    const ordered = [...values].sort((a, b) => a - b), half = ordered.length >> 1;
    return ordered.length % 2 ? ordered[half] : (ordered[half - 1] + ordered[half]) / 2;
  }

  function orderStatisticRank(n) {
    let k = 0, below = 0, outcomes = 1;
    while (k < n >> 1) {
      below += outcomes;
      if (1 - below / 2 ** (n - 1) < data.confidence) break;
      k += 1;
      outcomes = (outcomes * (n - k + 1)) / k;
    }
    return k;
  }

  function interval(values) {
    const n = values.length;
    if (n < 2) return null;
    const ordered = [...values].sort((a, b) => a - b), k = orderStatisticRank(n);
    if (k > 0) return [ordered[k - 1], ordered[n - k]];
    const mean = sum(values) / n;
    const deviation = Math.sqrt(sum(values.map((value) => (value - mean) ** 2)) / (n - 1));
    const half = (data.t[n - 2] * deviation) / Math.sqrt(n), centre = median(values);
    return [Math.min(mean - half, centre), Math.max(mean + half, centre)];
  }

  function verdict(metric, low, high) {
    if (!data.directions[metric] || low === null || (low <= 1 && 1 <= high)) return "no difference shown";
    return (low > 1) === (data.directions[metric] > 0) ? "better" : "worse";
  }

  // Values of the trials that both arms have, and whether these may be compared at all.
  function pairs(quantity, arm, reference) {
    const found = [];
    let comparable = true;
    arm.trials.forEach((trial, i) => {
      const j = reference.trials.indexOf(trial);
      if (j < 0) return;
      if (data.comparable[arm.conditions[i]][reference.conditions[j]] !== "1") comparable = false;
      found.push([arm.values[quantity]?.[i], reference.values[quantity]?.[j]]);
    });
    return [comparable, found];
  }

  // A pair with a null or a value that is not above 0 is left out; without any nothing was compared.
  function ratio(quantity, arm, reference) {
    const [comparable, found] = pairs(quantity, arm, reference);
    const logs = found.filter(([ours, theirs]) => ours > 0 && theirs > 0).map(([ours, theirs]) => Math.log(ours) - Math.log(theirs));
    const none = { median: null, low: null, high: null, n: logs.length };
    if (!comparable) return { ...none, verdict: "not comparable" };
    if (!logs.length) return { ...none, verdict: MISSING };
    const [low, high] = interval(logs)?.map(Math.exp) ?? [null, null];
    return { median: Math.exp(median(logs)), low, high, n: logs.length, verdict: verdict(quantity, low, high) };
  }

  function difference(quantity, arm, reference) {
    const [comparable, found] = pairs(quantity, arm, reference);
    const known = found.filter((pair) => pair.every(Number.isFinite)).map(([ours, theirs]) => ours - theirs);
    return comparable && known.length ? median(known) : null;
  }

  // --- the tables ---------------------------------------------------------------------------------------------------

  const fixed = (value) => (Number.isFinite(value) ? value.toFixed(2) : "inf");
  const looks = (found) => (["better", "worse"].includes(found.verdict) ? found.verdict : "neutral");
  const said = ({ verdict }) => `${data.signs[verdict] ?? ""} ${verdict}`.trim();

  function text(found) {
    if (found.median === null) return MISSING;
    return fixed(found.median) + "x" + (found.low === null ? "" : ` [${fixed(found.low)}, ${fixed(found.high)}]`);
  }

  function element(name, className, content = "") {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = content;
    return made;
  }

  // As the page's own: a ratio and its interval on a log axis, with a line at 1.
  function forest(found, span) {
    const width = 64, x = (value) => {
      const share = Math.log(value / span[0]) / Math.log(span[1] / span[0]);
      return 3 + Math.min(1, Math.max(0, share)) * (width - 6);
    };
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (name, attributes) => {
      const part = svg.appendChild(document.createElementNS(svg.namespaceURI, name));
      Object.entries(attributes).forEach(([key, value]) => part.setAttribute(key, value));
    };
    Object.entries({ class: "forest", width, height: 16, "aria-hidden": "true" }).forEach(([key, value]) => svg.setAttribute(key, value));
    add("line", { class: "one", x1: x(1), x2: x(1), y1: 0, y2: 16 });
    if (found.low !== null && found.low > 0) add("line", { class: "whisker", x1: x(found.low), x2: x(found.high), y1: 8, y2: 8 });
    add("rect", { x: x(found.median) - 2.5, y: 5.5, width: 5, height: 5 });
    return svg;
  }

  function ratioCell(found, reference, span) {
    const cell = element("td", "ratio " + looks(found)), line = element("span", "line");
    if (found.median !== null) line.append(forest(found, span));
    line.append(element("b", "", text(found)));
    cell.append(line, element("span", "sub", `${said(found)} \u00b7 n ${found.n} \u00b7 vs ${reference}`));
    Object.entries(found).forEach(([key, value]) => value !== null && (cell.dataset[key] = value));
    return cell;
  }

  const HEADLINE = "output_tokens_per_s";
  // A row of the verdict table is an arm's, or of several that did not run and so have no ratio.
  const rows = [...document.querySelectorAll("table.verdict tbody tr")];
  const armsOf = rows.map((row) => row.dataset.arms.split(" ").map(Number));
  const metricRows = [...document.querySelectorAll("#metrics tbody tr")].map((row) => ({ row, cells: [...row.cells] }));
  const ownCells = rows.map((row) => row.cells[2]);

  function showRatios() {
    const own = state.baseline === data.baseline, reference = data.arms[state.baseline];
    const found = rows.map((row, i) => (own || !ownCells[i] ? null : ratio(HEADLINE, data.arms[armsOf[i][0]], reference)));
    const seen = found.flatMap((each) => (each ? [each.median, each.low, each.high] : [])).filter((v) => v !== null && v > 1 / 30 && v < 30);
    const span = [Math.min(1, ...seen) / 1.08, Math.max(1, ...seen) * 1.08];
    rows.forEach((row, i) => {
      if (!ownCells[i]) return;
      let cell = ownCells[i];
      if (!own && armsOf[i][0] === state.baseline) {
        cell = element("td", "ratio neutral");
        cell.append(element("span", "sub", "baseline"));
      } else if (!own) cell = ratioCell(found[i], reference.name, span);
      row.cells[2].replaceWith(cell);
    });
    for (const { row, cells } of metricRows) {
      const [name, , metric] = JSON.parse(cells[2].dataset.source), arm = names.indexOf(name);
      const compared = data.directions[metric] && arm !== state.baseline;
      const each = own || !compared ? null : ratio(metric, data.arms[arm], reference);
      const made = each && [element("td", "num", text(each)), element("td", "num", each.n), element("td", "text " + looks(each), said(each))];
      if (made && each.median !== null) made[0].dataset.value = each.median;
      const wanted = own ? cells.slice(3, 6) : made || [element("td", "num"), element("td", "num"), element("td", "text neutral")];
      wanted.forEach((cell, i) => row.cells[3 + i].replaceWith(cell));
    }
  }

  // Cells of the charts' tables that compare the arm of their row: with whom, and by which ratio or difference.
  const followers = [...document.querySelectorAll("[data-follows]")].map((own) => {
    const [how, quantity] = own.dataset.follows.split(" ");
    return { own, how, quantity, now: own, arm: names.indexOf(own.parentNode.cells[0].textContent) };
  });
  const signed = { minimumFractionDigits: 2, maximumFractionDigits: 2, signDisplay: "always" };

  function followed({ own, how, quantity, arm }) {
    const cell = element("td", own.className, MISSING), reference = data.arms[state.baseline];
    if (arm === state.baseline) return cell;
    if (how === "name") {
      cell.textContent = reference.name;
      return cell;
    }
    const found = how === "ratio" ? ratio(quantity, data.arms[arm], reference) : null;
    const value = found ? found.median : difference(quantity, data.arms[arm], reference);
    if (value === null) return cell;
    cell.dataset.value = value;
    cell.textContent = found ? text(found) : (Math.round(100 * value) / 100 + 0).toLocaleString("en-US", signed);
    return cell;
  }

  function showFollowers() {
    for (const each of followers) {
      const wanted = state.baseline === data.baseline ? each.own : followed(each);
      each.now.replaceWith(wanted);
      each.now = wanted;
    }
  }

  // For the charts: an arm's ratio to the chosen baseline; null while the page stands as it was made.
  function against() {
    if (state.baseline === data.baseline) return null;
    const none = { median: null, low: null, high: null };
    return (quantity, arm) => (arm === state.baseline ? none : ratio(quantity, data.arms[arm], data.arms[state.baseline]));
  }

  // Rows that begin with an arm's name, and columns that are headed by one.
  const owned = [];
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells].map((cell) => names.indexOf(cell.textContent));
    for (const row of table.rows) {
      const named = names.indexOf(row.cells[0].textContent);
      const arms = table.classList.contains("verdict") ? armsOf[rows.indexOf(row)] : named >= 0 ? [named] : undefined;
      if (row.parentNode !== table.tHead && arms) owned.push([row, arms]);
      if (!table.classList.contains("verdict")) heads.forEach((arm, i) => arm >= 0 && i > 0 && owned.push([row.cells[i], [arm]]));
    }
  }

  // --- state --------------------------------------------------------------------------------------------------------

  function show() {
    choice.value = String(state.baseline);
    boxes.forEach((box) => (box.checked = !state.hidden.has(Number(box.value))));
    showRatios();
    showFollowers();
    owned.forEach(([node, arms]) => (node.hidden = arms.every((arm) => state.hidden.has(arm))));
    return figures.show(state.hidden, against());
  }

  function write() {
    const kept = new URLSearchParams();
    if (state.baseline !== data.baseline) kept.set("baseline", names[state.baseline]);
    if (state.hidden.size) names.forEach((name, i) => state.hidden.has(i) || kept.append("arm", name));
    if (root.dataset.theme) kept.set("theme", root.dataset.theme);
    const hash = String(kept);
    history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
  }

  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const baseline = names.indexOf(given.get("baseline"));
    state.baseline = [...choice.options].some((option) => Number(option.value) === baseline) ? baseline : data.baseline;
    const shown = given.getAll("arm").map((name) => names.indexOf(name)).filter((arm) => arm >= 0);
    state.hidden = new Set(shown.length ? names.flatMap((_, arm) => (shown.includes(arm) ? [] : [arm])) : []);
    if (["light", "dark"].includes(given.get("theme"))) root.dataset.theme = given.get("theme");
    else delete root.dataset.theme;
    show();
  }

  form.addEventListener("change", () => {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => Number(box.value)));
    if (hidden.size < boxes.length) state.hidden = hidden; // the last arm stays
    if (choice.selectedIndex >= 0) state.baseline = Number(choice.value);
    write();
    show();
  });
  form.querySelector("button").addEventListener("click", () => {
    state.hidden = new Set();
    write();
    show();
  });
  document.getElementById("theme").addEventListener("click", write);
  addEventListener("hashchange", read);
  choice.value = String(state.baseline);
  form.hidden = false;
  if (location.hash) read();
})();
