// A map of one source of GeoZarr, a pixel for each value of its finest level.

import Map from "ol/Map.js";
import TileLayer from "ol/layer/WebGLTile.js";
import GeoZarr from "ol/source/GeoZarr.js";
import View from "ol/View.js";

const LONGEST_MS = 60_000;

// Draws bands of a group, and returns the values at each pixel in turn and the errors of tiles.
async function draw(url, bands, shape, bbox) {
  const source = new GeoZarr({ url, bands, transition: 0 });
  const errors = [];
  source.on("tileloaderror", ({ tile }) => errors.push(String(tile.error_)));
  const layer = new TileLayer({ source, style: { color: ["color", ["band", 1], 0, 0] } });
  const [x0, y0, x1, y1] = bbox;
  const view = new View({
    projection: "EPSG:3857",
    center: [(x0 + x1) / 2, (y0 + y1) / 2],
    resolution: (x1 - x0) / shape[1],
    constrainResolution: false,
  });
  const [height, width] = shape;
  document.body.innerHTML = `<div id="map" style="width: ${width}px; height: ${height}px"></div>`;
  await new Promise((resolve, reject) => {
    source.on("change", () => (source.getState() === "ready" ? resolve() : reject(source.error_)));
  });
  const map = new Map({ target: "map", controls: [], layers: [layer], view });
  await new Promise((resolve) => map.once("rendercomplete", resolve));
  const values = [];
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      values.push(...(layer.getData([x + 0.5, y + 0.5]) ?? []));
    }
  }
  return { values, errors };
}

window.draw = (...given) => {
  const late = new Error("the map does not come to rest");
  const timeout = new Promise((_, reject) => setTimeout(reject, LONGEST_MS, late));
  return Promise.race([draw(...given), timeout]);
};
