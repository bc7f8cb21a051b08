"""Measure a server with OpenAI's interface under open-loop load: `baton bench`.

    load.py      what is sent, and when: arrivals, lengths, prompts, conversations
    client.py    one request, measured
    sender.py    a whole load: requests at their times, and how well this process kept them
    figures.py   percentiles and goodput of a load, and the file that holds them
    compare.py   two files of figures side by side
    table.py     figures as text
    charts.py    figures as SVG
    config.py    the settings
    main.py      a run, from its first question to its last file

The programs of tests/benchmarks use the same client.
"""
