from nanoserve.engine.sequence import Sequence


def test_a_sequence_counts_known_and_pending_tokens():
    prompt = [1, 2, 3]
    seq = Sequence("r", prompt, None, max_num_tokens=10)
    seq.token_ids.append(4)
    seq.num_pending = 1
    assert (seq.num_prompt_tokens, seq.num_output_tokens, seq.num_tokens) == (3, 1, 5)
    assert prompt == [1, 2, 3], "the caller's list is not ours"
