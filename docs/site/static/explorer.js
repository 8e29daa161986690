// Draws the timeline that a reader chooses on the front page, from window.multimeshTimelines (docs/site/explorer.py).
(() => {
  const form = document.getElementById("explorer"), runs = window.multimeshTimelines;
  if (!form || !runs) return;
  const svg = form.querySelector("svg"), said = form.querySelector("figcaption");
  const ROW = 24, GAP = 4, LEFT = 22, RIGHT = 58, NARROW = 11; // pixels
  const shape = (name, at, text) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const key in at) made.setAttribute(key, at[key]);
    if (text !== undefined) made.textContent = text;
    return svg.appendChild(made);
  };
  const draw = () => {
    const [schedule, pp, m] = ["schedule", "submeshes", "microbatches"].map((name) => form.elements[name].value);
    const run = runs[`${schedule},${pp},${m}`], width = form.clientWidth, room = width - LEFT - RIGHT;
    const scale = room / run.time, most = Math.max(...run.peaks), height = run.rows.length * (ROW + GAP);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    run.rows.forEach((spans, row) => {
      const y = row * (ROW + GAP), middle = y + ROW / 2 + 4;
      shape("text", { x: 2, y: middle, class: "soft" }, row);
      shape("rect", { x: LEFT, y, width: room, height: ROW, class: "idle" });
      for (const [phase, microbatch, start, duration] of spans) {
        const x = LEFT + start * scale, wide = duration * scale;
        shape("rect", { x, y, width: Math.max(wide - 0.6, 0.4), height: ROW, class: phase });
        if (wide > NARROW) shape("text", { x: x + wide / 2, y: middle, class: `on ${phase}` }, microbatch);
      }
      const memory = (RIGHT - 32) * run.peaks[row] / Number(m);
      shape("rect", { x: width - RIGHT + 5, y: y + 4, width: memory, height: ROW - 8, class: "memory" });
      shape("text", { x: width - 1, y: middle, class: "soft end" }, run.peaks[row]);
    });
    said.textContent = `${schedule}: submeshes are idle for ${run.bubble} % of the step, and hold activations of at most ` +
      `${most} microbatches (right).` + (run.stages > 1 ? ` Each has ${run.stages} stages.` : "");
  };
  form.hidden = false;
  form.addEventListener("input", draw);
  new ResizeObserver(draw).observe(form);
  draw();
})();
