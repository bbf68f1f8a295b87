"""The fronts' part of pairs, by which a collective library carries KV between two engines.

The engines' part is engine/collectives. No payload passes through a front.

    D: on_filled, admit --PairMessage{sequences}--------> P: PairSend to the engine
       PairReceive to the engine <--the same message------+
       slot of D <================ payload ============== slot of P
       |SlotFilled: checksum, Ingest, Taken ------------> release
"""
