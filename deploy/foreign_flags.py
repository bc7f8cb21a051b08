"""Flags and commands of other servers and of earlier releases, and what stands in their place here. Errors name it.

The names are those of vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo. A flag that a release renames or removes is
listed here, too: configuration files of earlier releases have it as a key.
"""

from __future__ import annotations

import re
from collections.abc import Container

FLAGS = {  # name: a clause that says what to do
    "--log-json": "the flag is --log-format json (without it, lines are text)",
    "--no-log-json": "the flag is --log-format text",
    "-tp": "the flag is --tp",
    "--tensor-parallel-size": "the flag is --tp",
    "--tp-size": "the flag is --tp",
    "--tp_size": "the flag is --tp",
    "--data-parallel-size": "start more nodes with --prefill and --decode; --dp-attention divides one node",
    "--dp-size": "start more nodes with --prefill and --decode; --dp-attention divides one node",
    "--enable-dp-attention": "the flag is --dp-attention N",
    "--pipeline-parallel-size": "there are no pipelines; --tp divides a model among GPUs",
    "--pp-size": "there are no pipelines; --tp divides a model among GPUs",
    "--enable-expert-parallel": "--tp divides the hidden units of every expert",
    "--ep-size": "--tp divides the hidden units of every expert",
    "--model-path": "the flag is --model",
    "--model-dir": "the flag is --model",
    "--tokenizer": "the tokenizer is the tokenizer.json in the directory of --model",
    "--tokenizer-path": "the tokenizer is the tokenizer.json in the directory of --model",
    "--served-model-name": "the flag is --model-name",
    "--alias": "the flag is --model-name",
    "--max-model-len": "the flag is --context-len",
    "--context-length": "the flag is --context-len",
    "--ctx-size": "the flag is --context-len",
    "--max-seq-len": "the flag is --context-len",
    "--max_seq_len": "the flag is --context-len",
    "--gpu-memory-utilization": "the flag is --memory-share",
    "--mem-fraction-static": "the flag is --memory-share; it counts weights, graphs, working memory and KV together",
    "--free_gpu_memory_fraction": "the flag is --memory-share; it counts the whole memory, not what is free",
    "--kv_cache_free_gpu_memory_fraction": "the flag is --memory-share; it counts the whole memory, not what is free",
    "--max-num-seqs": "the flag is --max-running",
    "--max-running-requests": "the flag is --max-running",
    "--max_batch_size": "the flag is --max-running",
    "--parallel": "the flag is --max-running",
    "--max-num-batched-tokens": "the flag is --chunk-tokens",
    "--max_num_tokens": "the flag is --chunk-tokens",
    "--chunked-prefill-size": "the flag is --chunk-tokens",
    "--max-prefill-tokens": "the flag is --chunk-tokens",
    "--enable-chunked-prefill": "prompts are always computed in chunks (--chunk-tokens)",
    "--max-queued-requests": "the flag is --max-waiting",
    "--block-size": "the flag is --page-size",
    "--kv-block-size": "the flag is --page-size",
    "--num-gpu-blocks-override": "the flag is --num-pages",
    "--max-total-tokens": "the flag is --num-pages, in pages of --page-size tokens",
    "--enable-prefix-caching": "it is on; --no-prefix-cache turns it off",
    "--no-enable-prefix-caching": "the flag is --no-prefix-cache",
    "--disable-radix-cache": "the flag is --no-prefix-cache",
    "--kv-cache-dtype": "the flag is --kv-dtype fp8",
    "--mamba-ssm-cache-dtype": "the flag is --state-dtype",
    "--mamba-ssm-dtype": "the flag is --state-dtype",
    "--enforce-eager": "set BATON_TRITON=0 for plain PyTorch without CUDA graphs",
    "--disable-cuda-graph": "set BATON_TRITON=0 for plain PyTorch without CUDA graphs",
    "--speculative-config": "the flags are --speculative, --draft-model and --draft-steps",
    "--speculative-algorithm": "the flag is --speculative, with a name in small letters",
    "--speculative-draft-model-path": "the flag is --draft-model",
    "--speculative-model": "the flag is --draft-model",
    "--model-draft": "the flag is --draft-model",
    "--speculative-num-steps": "the flag is --draft-steps",
    "--num-speculative-tokens": "the flag is --draft-steps",
    "--draft-max": "the flag is --draft-steps",
    "--speculative-eagle-topk": "the flag is --draft-topk",
    "--speculative-num-draft-tokens": "the flag is --draft-tokens",
    "--tool-call-parser": "the flag is --tool-parser",
    "--enable-auto-tool-choice": "it is on if the chat template shows tools, or with --tool-parser",
    "--chat-template": "the template is chat_template.jinja in the directory of --model",
    "--jinja": "chat templates are always used",
    "--enable-reasoning": "it is on if the chat template shows thoughts, or with --reasoning-parser",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave the flag out",
    "--kv-transfer-config": "`baton prefill` and `baton decode` are the two roles; --transport chooses how pages move",
    "--disaggregation-mode": "`baton prefill` and `baton decode` are the two roles",
    "--disaggregation-transfer-backend": "the flag is --transport",
    "--is-prefill-worker": "start the node with `baton prefill`",
    "--is-decode-worker": "start the node with `baton decode`",
    "--nnodes": "start a node on each host with `baton prefill` or `baton decode` (README: several hosts)",
    "--distributed-executor-backend": "ranks of a node are processes of one host; leave the flag out",
    "--swap-space": "pages are not swapped; leave the flag out",
    "--cpu-offload-gb": "weights are not offloaded; use more GPUs with --tp, or --quantization fp8",
    "--n-gpu-layers": "a node is on one device (--device); leave the flag out",
    "-ngl": "a node is on one device (--device); leave the flag out",
    "--enable-lora": "adapters are not served; merge them into the model",
    "--lora-modules": "adapters are not served; merge them into the model",
    "--lora-paths": "adapters are not served; merge them into the model",
    "--seed": "seeds are of requests (the field `seed`)",
    "--random-seed": "seeds are of requests (the field `seed`)",
    "--allowed-origins": "the flag is --allow-origin, once per origin",
    "--api-server-count": "the router is one process",
    "--log-requests": "each request has its lines in the log (--log-level)",
    "--disable-log-requests": "--log-level warning leaves them out",
    "--per-request-spec-decode-metrics": "a request asks for them (the field `return_metrics`)",
    "--uvicorn-log-level": "the flag is --log-level",
    "--ssl-keyfile": "a proxy in front may add TLS",
    "--ssl-certfile": "a proxy in front may add TLS",
    "--root-path": "a proxy in front may add a path",
    "--http-host": "the flag is --host",
    "--http-port": "the flag is --port",
    "--download-dir": "set the variable HF_HOME; models are kept in its folder hub",
    "--hf-token": "set the variable HF_TOKEN",
    "--hf-overrides": "edit config.json in the directory of --model",
    "--json-model-override-args": "edit config.json in the directory of --model",
    "--rope-scaling": "edit rope_scaling in config.json in the directory of --model",
}

COMMANDS = {  # word: a clause that says what to do
    "serve": "`baton up --model MODEL` serves a model",
    "launch": "`baton up --model MODEL` serves a model",
    "launch_server": "`baton up --model MODEL` serves a model",
    "run": "`baton up --model MODEL` serves a model",
    "start": "`baton up --model MODEL` serves a model",
    "server": "`baton up --model MODEL` serves a model",
    "frontend": "`baton router` is the HTTP server",
    "worker": "`baton prefill` and `baton decode` start nodes",
    "stop": "Ctrl-C or SIGTERM stops `baton up`",
    "pull": "`baton up --model ORG/NAME` downloads a model and serves it",
}

_BATON_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def hint(name: str, known: Container[str]) -> str | None:
    """Return what to do instead of giving a flag that is listed here; None: it is not. `known`: the flags of the
    command that it was given to."""
    clause = FLAGS.get(name) or FLAGS.get(name.replace("_", "-"))
    if clause is None:
        return None
    flags = _BATON_FLAG.findall(clause)
    is_elsewhere = flags and not any(flag in known for flag in flags)
    return clause + (" (of `baton up` and the nodes)" if is_elsewhere else "")
