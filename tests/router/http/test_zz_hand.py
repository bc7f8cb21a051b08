import os, time, pathlib
from .chats import TEMPLATE, call
from ..conftest import *
def test_hand(make_router, tokenizer_file):
    import tokenizers
    router = make_router(reasoning_parser=None)
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file)
    data = tokenizer_file
    from .chats import marked_system
    with marked_system(router, tokenizer_file, TEMPLATE) as system:
        def script(prompt, choice):
            text = system.tokenizer.decode(prompt)
            last = text.rsplit("<|im_start|>", 2)
            if "get_weather" in text and "tool\n" not in text:
                return system.say(call("get_weather", {"city": "Paris"}))
            if "final_result" in text:
                return system.say(call("final_result", {"city": "Paris"}))
            return system.say("the quick brown fox")
        system.cluster.generate_by(script)
        system.cluster.generate_by = None
        pathlib.Path("/tmp/w/tmp-clients/url").write_text(router.url)
        stop = pathlib.Path("/tmp/w/tmp-clients/stop")
        while not stop.exists():
            time.sleep(0.3)
