//! [`TRIALS`]: what each trial sends, what is right, and which words lead to the remedy.

/// A trial, in words.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) name: &'static str,
    pub(crate) sent: &'static str,
    /// What a right receiver does.
    pub(crate) right: &'static str,
    /// Words for a search engine.
    pub(crate) look_up: &'static [&'static str],
}

const fn trial(
    name: &'static str,
    sent: &'static str,
    right: &'static str,
    look_up: &'static [&'static str],
) -> Trial {
    Trial { name, sent, right, look_up }
}

/// All trials, in the order in which they run. Those that kill the receiver come last.
pub(crate) const TRIALS: &[Trial] = &[
    trial(
        "first-and-second",
        "one event, and once more after its 2xx",
        "both are answered 2xx, and there is one effect",
        &["idempotent consumer", "webhook deduplication by event id"],
    ),
    trial(
        "two-at-once",
        "one event in two requests at the same moment, 12 times",
        "one effect; a copy that is refused is answered 2xx when it is repeated",
        &["check-then-act race", "unique constraint", "INSERT ON CONFLICT DO NOTHING"],
    ),
    trial(
        "sixteen-at-once",
        "one event in sixteen requests at the same moment, 4 times",
        "one effect; a copy that is refused is answered 2xx when it is repeated",
        &["check-then-act race", "unique constraint", "INSERT ON CONFLICT DO NOTHING"],
    ),
    trial(
        "second-while-first-runs",
        "a slow event, and the same event while it runs (--slow)",
        "no 2xx while the first run may still fail; one effect",
        &["in-flight idempotency key", "409 or 503 with Retry-After while processing"],
    ),
    trial(
        "failure-then-retry",
        "an event whose first run fails, and its retries (--failing)",
        "the retry runs, is answered 2xx, and there is one effect",
        &["release the idempotency key on failure", "one transaction for key and effect"],
    ),
    trial(
        "signature-forged",
        "an event signed with another secret, and one that is changed after it was signed; then the genuine ones",
        "the forged ones are refused without an effect, and use no id up: the genuine ones run",
        &["webhook signature verification", "verify the signature before the idempotency key"],
    ),
    trial(
        "signature-missing",
        "an event without a signature; then the genuine one",
        "the first is refused without an effect, and uses no id up: the genuine one runs",
        &["webhook signature verification", "verify the signature before the idempotency key"],
    ),
    trial(
        "signature-stale",
        "an event that was signed a day ago; then the genuine one",
        "the first is refused without an effect, and uses no id up: the genuine one runs",
        &["webhook timestamp tolerance", "replay attack"],
    ),
    trial(
        "signature-doubled",
        "an event with two forged signatures, one with a forged and a valid signature; then the genuine ones",
        "two forged signatures are refused; each event has one effect after all",
        &["duplicate HTTP headers", "webhook signature verification"],
    ),
    trial(
        "other-body-same-id",
        "one event, and another body under its id",
        "one effect; the second is no 5xx, which a sender repeats without an end",
        &["idempotency key reused with another payload", "webhook deduplication by event id"],
    ),
    trial(
        "id-empty",
        "two events whose ids are empty",
        "both are refused, or both take effect: neither is a duplicate of the other",
        &["missing idempotency key", "input validation of the event id"],
    ),
    trial(
        "id-long",
        "two events with ids of 10 KB that differ at their ends",
        "each is refused, or has one effect: neither is a duplicate of the other",
        &["truncated key", "VARCHAR length of the event id", "hash long keys"],
    ),
    trial(
        "id-odd",
        "events whose ids differ in a letter that is not ASCII, or is percent-encoded; in the case of a letter; in JSON, one with U+0000",
        "each is refused, or has one effect: none is a duplicate of another",
        &["lossy UTF-8 decoding", "case-insensitive collation", "NUL in Postgres text"],
    ),
    trial(
        "body-slow",
        "an event whose body arrives in pieces over two seconds; if it is refused, once more",
        "it is answered 2xx in the end, and there is one effect",
        &["request read timeout", "buffer the body before the idempotency key"],
    ),
    trial(
        "body-broken",
        "bodies that end in the middle, are cut by a reset, or break the chunked encoding; then the whole event",
        "the whole event runs: a broken request uses no id up",
        &["incomplete request body", "buffer the body before the idempotency key"],
    ),
    trial(
        "body-chunked",
        "an event with a chunked body; then once more with a content length",
        "one effect; a receiver that refuses chunked bodies handles the other",
        &["Transfer-Encoding: chunked", "411 Length Required"],
    ),
    trial(
        "equal-bytes",
        "two events with equal bytes apart from their ids",
        "both take effect",
        &["deduplication by payload hash", "webhook deduplication by event id"],
    ),
    trial(
        "order-swapped",
        "two events, the later one first",
        "both take effect",
        &["out-of-order webhooks", "high-water mark of ids"],
    ),
    trial(
        "hang-up",
        "events whose client hangs up: after the head, in the body, and at several moments after the end; then retries",
        "each retry is answered 2xx, and each event has one effect",
        &["client disconnect cancels the request handler", "idempotency key with a lease"],
    ),
    trial(
        "kill-before",
        "half a request, `kill -9` of the receiver, its start, then the whole event (--start)",
        "the event is answered 2xx, and has one effect",
        &["crash recovery", "idempotency key with a lease"],
    ),
    trial(
        "kill-in",
        "events whose receiver is killed at several moments before its answer, its start, then retries (--start)",
        "each retry is answered 2xx, and each event has one effect",
        &[
            "transactional inbox",
            "one transaction for key and effect",
            "idempotency key with a lease",
        ],
    ),
    trial(
        "kill-after",
        "events whose receiver is killed at its answer 2xx, its start, then the same events (--start)",
        "what was answered 2xx has its effect, and no repetition adds another",
        &["durable idempotency keys", "synchronous_commit, fsync", "transactional inbox"],
    ),
    trial(
        "late-effects",
        "nothing: the effects of all trials are counted again",
        "no event has got another effect since its trial",
        &["idempotent consumer", "job queue at-least-once"],
    ),
    trial(
        "an-hour-later",
        "nothing: a redelivery after an hour or after days is out of scope",
        "ids are kept for longer than the sender repeats events",
        &["retention of idempotency keys", "retry schedule of the sender"],
    ),
];
