//! Requests that arrive in pieces, or break off.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::delivery::Template;
use crate::judge::{Judge, RUNS, Shown};
use crate::trial::Trial;
use crate::wire::{self, Answer};

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "body-slow",
        sent: "an event whose body arrives in pieces over two seconds; if it is refused, once more",
        right: "it is answered 2xx in the end, and there is one effect",
        look_up: &["request read timeout", "buffer the body before the idempotency key"],
        run: |judge| Box::pin(body_slow(judge)),
    },
    Trial {
        name: "body-broken",
        sent: "bodies that end in the middle, are cut by a reset, or break the chunked encoding; then the whole event",
        right: "the whole event runs: a broken request uses no id up",
        look_up: &["incomplete request body", "buffer the body before the idempotency key"],
        run: |judge| Box::pin(body_broken(judge)),
    },
    Trial {
        name: "body-chunked",
        sent: "an event with a chunked body; then once more with a content length",
        right: "one effect; a receiver that refuses chunked bodies handles the other",
        look_up: &["Transfer-Encoding: chunked", "411 Length Required"],
        run: |judge| Box::pin(body_chunked(judge)),
    },
    Trial {
        name: "hang-up",
        sent: "events whose client hangs up: after the head, in the body, and at several moments after the end; then retries",
        right: "each retry is answered 2xx, and each event has one effect",
        look_up: &["client disconnect cancels the request handler", "idempotency key with a lease"],
        run: |judge| Box::pin(hang_up(judge)),
    },
];

async fn body_slow(judge: &Judge) -> Shown {
    let id = judge.id();
    let request = judge.event(&id)?;
    let mut slow = judge.open(&wire::head(&judge.target, &request)).await;
    for piece in request.body().chunks(request.body().len().div_ceil(4).max(1)) {
        sleep(Duration::from_millis(500)).await;
        slow.write(piece).await;
    }
    then_whole(judge, &id, &slow.answer().await, "the slow body").await
}

async fn body_chunked(judge: &Judge) -> Shown {
    let id = judge.id();
    let chunked = wire::chunked(&judge.target, &judge.event(&id)?, wire::LAST_CHUNK);
    let answer = judge.open(&chunked).await.answer().await;
    then_whole(judge, &id, &answer, "the chunked body").await
}

/// Sends the whole event after one whose body came in another way.
async fn then_whole(judge: &Judge, id: &str, answer: &Answer, what: &str) -> Shown {
    let bound = if answer.is_success() { judge.settles() } else { judge.patience };
    let whole = judge.handled(id, bound).await?;
    judge.with_effects(format!("{what} is answered {answer}, then {whole}"))
}

async fn body_broken(judge: &Judge) -> Shown {
    let mut events = Vec::new();
    for way in 0..4 {
        let id = judge.id();
        let request = judge.event(&id)?;
        let mut broken = match way {
            0 | 1 => judge.open_half(&request).await,
            2 => judge.open(&wire::chunked(&judge.target, &request, b"")).await,
            _ => judge.open(&wire::chunked(&judge.target, &request, b"no size\r\n")).await,
        };
        if way == 1 {
            sleep(RUNS / 3).await;
            broken.reset();
        } else {
            broken.end().await;
            let _ = timeout(2 * RUNS, broken.answer()).await;
        }
        events.push((&judge.template, id));
    }
    sleep(RUNS).await;
    judge.all_handled(&events).await?;
    judge.with_effects("each whole event after a broken one is answered 2xx")
}

async fn hang_up(judge: &Judge) -> Shown {
    let ordinary = [100, 100, 0, 2, 5, 20, 100].map(Duration::from_millis);
    let ordinary = ordinary.map(|pause| (&judge.template, pause)).into_iter();
    let slow = judge.slow_moments().await?;
    let hung_up = async |(at, (template, pause)): (usize, (&Template, _))| {
        let id = judge.id();
        let request = judge.signed(template.with(&id))?;
        let open = match at {
            0 => judge.open(&wire::head(&judge.target, &request)).await,
            1 => judge.open_half(&request).await,
            _ => judge.open(&wire::whole(&judge.target, &request)).await,
        };
        sleep(pause).await;
        drop(open);
        // At once: the first run may go on.
        judge.retry(template, &id, judge.patience).await.map(|_| id)
    };
    let ids = join_all(ordinary.chain(slow).enumerate().map(hung_up)).await;
    let ids: Vec<_> = ids.into_iter().collect::<Result<_, _>>()?;
    judge.one_effect(&ids, judge.patience).await?;
    judge.with_effects(format!("{} hang-ups, each retry is answered 2xx in the end", ids.len()))
}
