"""What `baton --help` tells."""

TITLE = """\
Baton serves large language models with prefill and decode in separate processes: a router takes
OpenAI-style requests, prefill nodes compute the prompts' KV caches, decode nodes generate the answers."""

SUMMARIES = {
    "up": "start a router and nodes on this host, and stop them together",
    "router": "start the HTTP server that spreads requests over the nodes",
    "prefill": "start a node that computes prompts",
    "decode": "start a node that generates",
    "chat": "talk to a running model in the terminal",
    "explain": "show where a request's time went",
    "keys": "make a key file, with which processes on several hosts trust each other",
}

EPILOG = """\
one host:
  baton up                          the demo model, one prefill and one decode node, http://127.0.0.1:8000
  baton up --model DIR --decode 2   a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)
  baton chat                        in another terminal

several hosts (in any order; a copy of one key file on each, or a key each: docs/operations.md, Keys of nodes):
  baton keys cluster.key
  router$   baton router  --node-address tcp://0.0.0.0:5700 --host 0.0.0.0 --keys cluster.key
  host1$    baton prefill --router tcp://ROUTER:5700 --bind-host HOST1 --model DIR --keys cluster.key
  host2$    baton decode  --router tcp://ROUTER:5700 --model DIR --keys cluster.key

who does what:
  router    HTTP, text <-> tokens, which pair of nodes gets a request; holds no model, needs no torch
  prefill   computes a prompt's KV pages and the first token; offers the pages
  decode    reserves pages, pulls them from prefill, checks them, generates the rest

configuration:
  every flag of `baton COMMAND --help` is also a key (dashes become underscores) of the command's table in a
  TOML file, --config FILE; --print-config prints what is in force in that form. A flag wins over the
  environment (BATON_API_KEY), that over the file, that over the default.

when something is wrong:
  nothing starts       the last line on stderr says why; `baton up` names the log of the process that died
  it does not answer   GET /ready says what is missing, /debug/nodes who has joined, /debug/ledger who holds pages
  it is slow           `baton explain` for one request's time; GET /metrics: queue, transfer and token times
  what travels         GET /debug/handoff?format=text: pages, every field beside them, bytes a request
  a crash              --log-level debug, and docs/operations.md
"""
