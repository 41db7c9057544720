// A small plot over time, drawn as SVG. Points without a value are gaps.

import { shape } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;

// points: [[time, value or null]], in order of time. from, to: the times at both edges. top: the
// value at the upper edge. words: what the plot shows, for those who cannot see it.
export function draw(svg, points, from, to, top, words) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", words);
  const x = (time) => (WIDTH * (time - from)) / (to - from);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 6) * value) / (top > 0 ? top : 1);
  const parts = [shape("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 })];
  for (const run of runsOf(points.filter(([time]) => time >= from))) {
    // a value that stands alone is a short stroke
    const ends = run.length > 1 ? run : [[run[0][0] - 1, run[0][1]], run[0]];
    const line = ends.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const [first, last] = [x(ends[0][0]).toFixed(1), x(ends.at(-1)[0]).toFixed(1)];
    parts.push(shape("polygon", { class: "area", points: `${first},${HEIGHT} ${line} ${last},${HEIGHT}` }));
    parts.push(shape("polyline", { class: "trace", points: line }));
  }
  svg.replaceChildren(...parts);
}

// Stretches of points that have values.
function runsOf(points) {
  const runs = [[]];
  for (const [time, value] of points) {
    if (value === null) runs.push([]);
    else runs.at(-1).push([time, value]);
  }
  return runs.filter((run) => run.length > 0);
}
