"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#B8A900"];
const DARK = matchMedia("(prefers-color-scheme: dark)");

// an element with attributes and children; text is never read as HTML
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter(c => c !== null && c !== undefined));
  return made;
}

const number = (x, digits = 3) =>
  x === null || x === undefined ? "" : typeof x !== "number" ? String(x) : Number.isInteger(x) ? x.toLocaleString("en") : String(+x.toPrecision(digits));
const percent = x => `${(100 * x).toFixed(x > 0 && x < 0.0995 || x > 0.9 && x < 1 ? 1 : 0)} %`;

// rungs of a reward, from red to green
function rungColour(tier, tiers) {
  const at = tiers.length < 2 ? 1 : tiers.indexOf(tier) / (tiers.length - 1);
  return tiers.includes(tier) ? `hsl(${Math.round(20 + 145 * at)} 75% 42%)` : "#888";
}
const rung = (tier, tiers) => el("span", {class: "rung", style: `--dot:${rungColour(tier, tiers)}`}, tier);

// ---- charts

function theme() {
  const css = getComputedStyle(document.documentElement);
  const [text, soft, line] = ["--text", "--soft", "--line"].map(name => css.getPropertyValue(name).trim());
  return {
    background: "transparent", font: "system-ui, sans-serif", view: {stroke: null}, range: {category: COLOURS},
    axis: {labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11},
    legend: {labelColor: text, titleColor: soft, orient: "bottom", columns: 3, labelLimit: 160, title: null, symbolType: "stroke"},
    line: {strokeWidth: 1.8}, point: {size: 40, filled: true}, rule: {color: soft}, text: {color: text},
  };
}

const drawn = new Map(); // element -> [specification, view]

// draw a Vega-Lite specification into an element; again when the reader changes between light and dark
function draw(element, spec) {
  if (!window.vega || !window.vegaLite) { $("missing").hidden = false; return; }
  drawn.get(element)?.[1].finalize();
  const full = {width: "container", height: 170, autosize: {type: "fit", contains: "padding"}, ...spec, config: theme()};
  element.replaceChildren();
  const view = new vega.View(vega.parse(vegaLite.compile(full, {logger: vega.logger(vega.Error)}).spec), {
    renderer: "svg", container: element, hover: true, logLevel: vega.Error, tooltip: showTip,
  });
  view.runAsync();
  drawn.set(element, [spec, view]);
}
DARK.addEventListener("change", () => { for (const [element, [spec]] of [...drawn]) if (element.isConnected) draw(element, spec); });

function showTip(handler, event, item, value) {
  let tip = document.querySelector(".tip");
  if (value === null || value === undefined || value === "") { tip?.remove(); return; }
  if (!tip) document.body.append(tip = el("div", {class: "tip", role: "status"}));
  tip.textContent = typeof value === "object" ? Object.entries(value).map(([k, v]) => `${k}: ${v}`).join("\n") : String(value);
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
}

// a figure: caption, chart, and its numbers as a table for those who cannot see or point at it
function figure(title, note, spec, rows) {
  const place = el("div", {class: "chart", role: "img", "aria-label": `${title}. ${note || ""}`});
  const made = el("figure", {}, el("figcaption", {}, title, note ? el("small", {}, note) : null), place);
  if (rows) {
    const details = el("details", {ontoggle: () => { if (details.open && details.childElementCount === 1) details.append(table(rows)); }}, el("summary", {}, "numbers"));
    made.append(details);
  }
  return [made, () => draw(place, spec)];
}

function table(rows) {
  const columns = [...new Set(rows.flatMap(row => Object.keys(row)))];
  return el("div", {class: "wide"}, el("table", {},
    el("thead", {}, el("tr", {}, columns.map(c => el("th", {scope: "col"}, c)))),
    el("tbody", {}, rows.map(row => el("tr", {}, columns.map(c => el("td", {class: "number"}, number(row[c]))))))));
}

// ---- a list of texts with a search field; `shows(row, words)` filters, `card(row)` draws; more are shown on request
function list(place, card, size = 25) {
  let rows = [], shown = size;
  const more = el("button", {onclick: () => { shown += size; fill(); }}, "show more");
  function fill() {
    place.replaceChildren(...rows.slice(0, shown).map(card), ...(rows.length > shown ? [more] : []));
  }
  return found => { rows = found; shown = size; fill(); };
}
const holds = (text, words) => { const low = text.toLowerCase(); return words.every(word => low.includes(word)); };
const wordsOf = text => text.toLowerCase().split(/\s+/).filter(Boolean);
function fillSelect(select, pairs) { select.replaceChildren(...pairs.map(([value, label]) => el("option", {value}, label))); }

// the address keeps what was chosen, so that a view can be linked
function remember(values) { history.replaceState(null, "", "#" + new URLSearchParams(values)); }
const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
document.addEventListener("keydown", event => {
  const search = $("search");
  if (event.key === "/" && search && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); }
});
