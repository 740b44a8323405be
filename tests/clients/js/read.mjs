// Reads arrays with zarrita: a JSON list of URLs on stdin, one JSON object a line on stdout.

import { stdin, stdout } from "node:process";
import { text } from "node:stream/consumers";
import * as zarr from "zarrita";

function encoded(data) {
  if (data instanceof Array) {
    return { strings: data };
  }
  const { buffer, byteOffset = 0, byteLength } = data;
  return { base64: Buffer.from(buffer, byteOffset, byteLength).toString("base64") };
}

async function read(url) {
  try {
    const array = await zarr.open(new zarr.FetchStore(url), { kind: "array" });
    const all = array.shape.length ? await zarr.get(array) : await array.getChunk([]);
    const { data, shape, stride } = all;
    return { url, dtype: array.dtype, chunks: array.chunks, shape, stride, ...encoded(data) };
  } catch (error) {
    return { url, error: String(error) };
  }
}

for (const url of JSON.parse(await text(stdin))) {
  stdout.write(`${JSON.stringify(await read(url))}\n`);
}
