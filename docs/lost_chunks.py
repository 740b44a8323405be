"""Write 64 inner chunks of 8 shards from 16 threads, and count those that are lost.

In a checkout: pip install '.[demo]' obstore && python docs/lost_chunks.py
"""

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import obstore
import zarr

CORNERS = list(product(range(0, 100, 25), repeat=3))


def write_and_count_lost(array):
    def write(corner):
        array[tuple(slice(start, start + 25) for start in corner)] = 1

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, CORNERS))
    return sum(int(array[corner] == 0) for corner in CORNERS)


with tempfile.TemporaryDirectory() as folder:
    cube = {"shape": [100] * 3, "shards": [50] * 3, "chunks": [25] * 3, "dtype": "uint8"}
    alone, _ = (zarr.create_array(folder, name=name, **cube) for name in ("alone", "shared"))
    print("zarr-python alone:", write_and_count_lost(alone), "of 64 lost")

    command = ["shardgate", "serve", "--writable", "--port", "0", f"data={folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        try:
            url = gateway.stdout.readline().split("/ ")[0]
            store = obstore.store.HTTPStore(url, client_options={"allow_http": True})
            shared = zarr.open_array(zarr.storage.ObjectStore(store), path="shared", mode="r+")
            print("through Shardgate:", write_and_count_lost(shared), "of 64 lost")
        finally:
            gateway.terminate()
