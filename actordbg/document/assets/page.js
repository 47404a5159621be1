(function () {
  "use strict";
  var root = document.documentElement;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  root.classList.add("js");

  function columns(spec, width) {
    var most = 1;
    spec.layer.forEach(function (one) {
      var colour = (one.encoding || {}).color || (spec.encoding || {}).color;
      if (!colour || colour.type !== "nominal") { return; }
      (one.data || spec.data).values.forEach(function (value) { most = Math.max(most, String(value[colour.field]).length); });
    });
    return Math.max(1, Math.floor((width - 60) / (36 + 6.3 * Math.min(most, 40))));
  }

  function theme(inARow) {
    var style = getComputedStyle(root);
    function of(name) { return style.getPropertyValue("--" + name).trim(); }
    function all(letter, count) { return Array.from({ length: count }, function (_, at) { return of(letter + at); }); }
    var font = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif";
    return {
      background: null, font: font,
      view: { stroke: null },
      axis: { labelColor: of("soft"), titleColor: of("ink"), gridColor: of("line"), domainColor: of("soft"), tickColor: of("line"),
        labelFontSize: 11, titleFontSize: 11.5, titleFontWeight: 600, labelLimit: 150, titlePadding: 8 },
      axisX: { grid: false, labelAngle: 0 }, axisQuantitative: { tickCount: 6, labelOverlap: true, labelSeparation: 8 }, axisBand: { grid: false },
      legend: { labelColor: of("soft"), titleColor: of("soft"), orient: "top", titleFontSize: 11, labelFontSize: 11, labelLimit: 260, columns: inARow,
        symbolType: "circle", gradientLength: window.innerWidth < 640 ? 64 : 140, offset: 6, titleOrient: "left",
        layout: { top: { direction: window.innerWidth < 640 ? "vertical" : "horizontal", anchor: "start", offset: 6 } } },
      range: { category: all("c", 10), heatmap: all("h", 9), ramp: all("h", 9) },
      text: { color: of("soft"), fontSize: 11 }
    };
  }

  function draw(figure) {
    figure.setAttribute("data-state", "drawing");
    var spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    var live = figure.querySelector(".live");
    spec.autosize = { type: "fit-x", contains: "padding" };
    live.hidden = false;
    return vegaEmbed(live, spec, {
      ast: true, actions: false, renderer: "svg", mode: "vega-lite", defaultStyle: false, config: theme(columns(spec, live.clientWidth)),
      tooltip: { disableDefaultStyle: true, theme: "page" }
    }).then(function (result) {
      if (!figure.classList.contains("drawn")) { figure.querySelector("details").open = false; }
      figure.classList.add("drawn");
      figure.setAttribute("data-state", "drawn");
      figure.vegaView = result.view;
    }, function (error) {
      live.hidden = true;
      figure.classList.remove("drawn");
      figure.querySelector("details").open = true;
      figure.setAttribute("data-state", "failed");
      console.error("chart: " + error);
    });
  }

  var charts = Array.from(document.querySelectorAll("figure.chart"));
  if (charts.length && window.vegaEmbed) {
    var seen = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) {
        if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
      });
    }, { rootMargin: "500px" });
    charts.forEach(function (figure) { seen.observe(figure); });
    dark.addEventListener("change", function () {
      charts.forEach(function (figure) { if (figure.dataset.state === "drawn") { figure.vegaView.finalize(); draw(figure); } });
    });
  }

  function say(element, text) {
    var figure = element.closest("figure");
    var place = figure && figure.querySelector(".why");
    if (place) { place.textContent = text; }
  }

  function copy(text) {
    if (navigator.clipboard && window.isSecureContext) { return navigator.clipboard.writeText(text); }
    var area = document.createElement("textarea");
    area.value = text;
    document.body.appendChild(area);
    area.select();
    var done = document.execCommand("copy");
    area.remove();
    return done ? Promise.resolve() : Promise.reject(new Error("not allowed"));
  }

  document.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-copy]");
    if (!button || !button.dataset.copy) { return; }
    var before = button.textContent;
    copy(button.dataset.copy).then(function () {
      if (button.classList.contains("copy")) {
        button.textContent = "copied";
        setTimeout(function () { button.textContent = before; }, 1500);
      }
      button.setAttribute("data-copied", "yes");
      say(button, "copied: " + button.dataset.copy);
    }, function () { say(button, button.dataset.copy); });
  });

  ["mouseover", "focusin"].forEach(function (kind) {
    document.addEventListener(kind, function (event) {
      var cell = event.target.closest && event.target.closest("button.cell");
      if (cell) { say(cell, cell.dataset.why + (cell.dataset.copy ? "  (click copies: " + cell.dataset.copy + ")" : "")); }
    });
  });
})();
