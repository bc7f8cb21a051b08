"""A simulation of the router and its nodes, event by event. Its input is measured times and the arrivals of requests.
Its output is latencies and goodput.

    traffic   when requests arrive           times   what a GPU takes, as measured        costs   what a step takes
       |                                                                                            |
       +--> cluster: router --> prefill_node --> decode_node (events in time order: agenda) <-------+
                                                     |
                                                     v
                                               figures: percentiles, goodput

The router here keeps simple books, but takes its decisions by the product's own functions
(router/placement/placement.py, router/placement/prompt_placement.py). Nothing here imports torch.
"""
