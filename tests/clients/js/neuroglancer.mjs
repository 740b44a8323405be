// Bundles Neuroglancer, as its public page has it, into a folder. Its Python package lacks sign-in.
// The icons are left out: they are on no registry, and package.json puts another package there.
import { build } from "esbuild";
import { writeFile } from "node:fs/promises";

const lib = new URL("node_modules/neuroglancer/lib/", import.meta.url).pathname;
const icons = {
  name: "icons",
  setup({ onResolve, onLoad }) {
    onResolve({ filter: /^ikonate\// }, ({ path }) => ({ path, namespace: "icons" }));
    onLoad({ filter: /./, namespace: "icons" }, () => ({ contents: "<svg></svg>", loader: "text" }));
  },
};
const options = {
  bundle: true,
  format: "esm",
  target: "es2022",
  plugins: [icons],
  loader: { ".html": "text" },
  logLevel: "error",
};
const folder = process.argv[2];
const entries = ["main", "chunk_worker"].map((name) => `${lib}${name}.bundle.js`);
await build({ ...options, entryPoints: entries, outdir: `${folder}/page` });
// Workers look for it one folder up.
await build({ ...options, entryPoints: [`${lib}async_computation.bundle.js`], outdir: folder });
await writeFile(
  `${folder}/index.html`,
  `<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page/main.bundle.css">
<div id="neuroglancer-container"></div><script type="module" src="page/main.bundle.js"></script>`,
);
