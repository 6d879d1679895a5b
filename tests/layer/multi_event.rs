//! Deliveries of several events, on every adapter and under every ledger: what is new runs, what
//! was done is not repeated, and what runs elsewhere makes the answer 503.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::postgres::{PgPoolOptions, Postgres};
use tower_dedup::adapter::{DedupAdapter, MaintenanceAdapter, PostgresAdapter};
use tower_dedup::{DedupKey, DedupLayer};

use crate::support::multi_event::{
    Kind, LATE, Rig, Runs, apart, by_word, cases, ids, layers, own, pg, send_to, service, terms,
    within,
};
use crate::support::proxy::{Cut, Proxy};
use crate::support::{Faulty, Op, dedup_key};

macro_rules! under_every_ledger {
    ($($case:ident),+ $(,)?) => {
        cases! {
            memory_lease: memory_under(Lease) = [$($case),+];
            memory_arrival: memory_under(Arrival) = [$($case),+];
            sqlite_lease: sqlite_under(Lease) = [$($case),+];
            sqlite_arrival: sqlite_under(Arrival) = [$($case),+];
            sqlite_transactional: sqlite_under(Transactional) = [$($case),+];
            postgres_lease: postgres_under(Lease) = [$($case),+];
            postgres_arrival: postgres_under(Arrival) = [$($case),+];
            postgres_transactional: postgres_under(Transactional) = [$($case),+];
        }
    };
}

under_every_ledger!(
    what_is_new_runs_and_nothing_else,
    a_poison_event_does_not_repeat_the_others,
    a_handler_that_fails_half_way_does_not_repeat_what_is_done,
    an_event_in_flight_elsewhere_is_503_after_the_new_ones,
    retries_in_other_batches_process_only_what_is_new,
    overlapping_batches_race_and_every_event_takes_effect_once,
    second_identities_of_a_batch,
    as_many_as_may_be_and_one_more,
);

async fn what_is_new_runs_and_nothing_else(rig: Rig) {
    assert_eq!(rig.send("a b c").await, own(200));
    assert_eq!(rig.news(), ["a", "b", "c"]);
    assert_eq!(rig.send("c d b d e").await, own(200));
    assert_eq!(rig.news(), ["d", "e"]);
    let delivery = rig.last();
    assert!(delivery.is_done(&dedup_key("d")) && !delivery.needs_run(&dedup_key("c")));
    assert_eq!(delivery.key(), Some(&dedup_key("d")));
    assert_eq!(rig.send("e a").await, layers(200, "duplicate"));
    assert_eq!(rig.send("  ").await, layers(400, "invalid-key"));
    assert_eq!((rig.effects.all().await, rig.runs()), (ids("a b c d e"), 2));
    // Many, which are looked up otherwise.
    let many: Vec<String> = (0..40).map(|n| format!("n{n:02}")).collect();
    assert_eq!(rig.send(&format!("e {}", many.join(" "))).await, own(200));
    assert_eq!(rig.news(), many);
    assert!(!rig.last().mark_done(&dedup_key("e")));
}

/// The handler goes on after it, and says so in the end.
async fn a_poison_event_does_not_repeat_the_others(rig: Rig) {
    for (way, poison) in [("fail", "p"), ("sql", "q")] {
        let (before, after) = (format!("a{poison}"), format!("z{poison}"));
        let batch = |way: &str| format!("{before} {poison}:{way} {after}");
        assert_eq!(rig.send(&batch(way)).await, own(500));
        assert!(rig.is_complete(&before).await && rig.is_complete(&after).await);
        if rig.kind == Kind::Arrival {
            assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
            assert!(!rig.effects.all().await.contains(&poison.to_owned()), "lost, as documented");
            continue;
        }
        for _ in 0..2 {
            assert_eq!(rig.send(&batch(way)).await, own(500));
            assert_eq!(rig.news(), [poison]);
        }
        assert_eq!(rig.send(&batch("")).await, own(200));
        assert_eq!((rig.news(), rig.last().is_takeover()), (ids(poison), false));
        assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
        let all = rig.effects.all().await;
        for once in [&before, poison, &after] {
            assert_eq!(all.iter().filter(|id| *id == once).count(), 1, "{once}");
        }
    }
}

/// It ends at the poison event: by its status, its error, its panic, dropped, or in a transaction
/// that is aborted.
async fn a_handler_that_fails_half_way_does_not_repeat_what_is_done(rig: Rig) {
    let ways = [("500", 500), ("error", 1), ("panic", 0), ("hang", 504), ("abort", 500)];
    for (n, (way, status)) in ways.into_iter().enumerate() {
        let batch = |way: &str| {
            format!("a{n} b{n} p{n}:{way} c{n} {}", if way == "hang" { "impatient!" } else { "" })
        };
        assert_eq!(rig.send(&batch(way)).await, own(status), "{way}");
        assert!(rig.is_complete(&format!("a{n}")).await && rig.is_complete(&format!("b{n}")).await);
        let retried = rig.send(&batch("")).await;
        if rig.kind == Kind::Arrival {
            assert_eq!(retried, layers(200, "duplicate"));
            assert_eq!(rig.effects.all().await.len(), 2 * (n + 1));
            continue;
        }
        assert_eq!(retried, own(200), "{way}");
        assert_eq!(rig.news(), [format!("p{n}"), format!("c{n}")]);
        // A lease counts what it has begun; a transaction leaves nothing behind.
        let attempt = if rig.kind == Kind::Lease { 2 } else { 1 };
        assert_eq!((rig.last().attempt(), rig.last().is_takeover()), (attempt, false));
        assert_eq!(rig.send(&batch("")).await, layers(200, "duplicate"));
        assert_eq!(rig.effects.all().await.len(), 4 * (n + 1), "{way}");
    }
    let all = rig.effects.all().await;
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
}

async fn an_event_in_flight_elsewhere_is_503_after_the_new_ones(rig: Rig) {
    let (one, two) = (terms(), terms());
    rig.store.claim(&[dedup_key("b")], &one).await.unwrap();
    rig.store.claim(&[dedup_key("d")], &two).await.unwrap();
    assert_eq!(rig.send("a b c").await, layers(503, "in-flight"));
    assert_eq!((rig.news(), rig.effects.all().await), (ids("a c"), ids("a c")));
    assert!(rig.is_complete("a").await && rig.is_complete("c").await);
    // Nothing is new: nothing runs.
    assert_eq!(rig.send("a b c d").await, layers(503, "in-flight"));
    assert_eq!(rig.runs(), 1);
    // There it succeeds, and there it fails.
    rig.store.complete(&[dedup_key("b")], &one).await.unwrap();
    rig.store.release(&[dedup_key("d")], &two).await.unwrap();
    assert_eq!(rig.send("a b c").await, layers(200, "duplicate"));
    assert_eq!(rig.send("a b c d").await, own(200));
    assert_eq!((rig.news(), rig.effects.all().await), (ids("d"), ids("a c d")));
}

/// Trap 35, many times over.
async fn retries_in_other_batches_process_only_what_is_new(rig: Rig) {
    const EVENTS: usize = 30;
    for _ in 0..40 {
        let mut batch: Vec<usize> =
            (0..rand::random_range(1..8)).map(|_| rand::random_range(0..EVENTS)).collect();
        batch.dedup();
        let done: HashSet<String> = rig.effects.all().await.into_iter().collect();
        let runs = rig.runs();
        let words: Vec<String> = batch
            .iter()
            .map(|event| {
                let fails = rig.kind != Kind::Arrival && rand::random_ratio(1, 4);
                format!("e{event:02}{}", if fails { ":fail" } else { "" })
            })
            .collect();
        let (status, _) = rig.send(&words.join(" ")).await;
        assert!(status == 200 || status == 500, "{status}");
        if rig.runs() > runs {
            assert!(rig.news().iter().all(|id| !done.contains(id)), "{:?} {done:?}", rig.news());
        }
    }
    let all: Vec<String> = (0..EVENTS).map(|event| format!("e{event:02}")).collect();
    assert_eq!(rig.send(&all.join(" ")).await.0, 200);
    assert_eq!(rig.effects.all().await, all);
}

/// Tasks on both processes, with batches in every order; some fail over an event now and then.
async fn overlapping_batches_race_and_every_event_takes_effect_once(rig: Rig) {
    const EVENTS: usize = 24;
    for round in 0..4 {
        let deliver = |task: usize| {
            let mut left: Vec<usize> = (0..EVENTS).collect();
            let batch: Vec<String> = (0..8)
                .map(|_| left.swap_remove(rand::random_range(0..left.len())))
                .map(|event| format!("r{round}e{event}"))
                .collect();
            let fails = rig.kind != Kind::Arrival;
            let service = rig.services[task % 2].clone();
            tokio::spawn(async move {
                for attempt in 0.. {
                    let poison = rand::random_range(0..batch.len());
                    let words = batch.iter().enumerate().map(|(place, id)| {
                        let fails = fails && attempt < 2 && place == poison;
                        format!("{id}{}", if fails { ":fail" } else { "" })
                    });
                    let (status, why) =
                        send_to(&service, &words.collect::<Vec<_>>().join(" ")).await;
                    match (status, &*why) {
                        (200, _) => return batch,
                        (500, "") | (503, "in-flight") => {}
                        other => panic!("{other:?}"),
                    }
                    tokio::time::sleep(Duration::from_millis(rand::random_range(1..20))).await;
                }
                unreachable!()
            })
        };
        let tasks = join_all((0..8).map(deliver));
        let batches =
            tokio::time::timeout(Duration::from_secs(60), tasks).await.expect("no deadlock");
        let mut sent: Vec<String> = batches
            .into_iter()
            .flat_map(Result::unwrap)
            .collect::<HashSet<_>>()
            .into_iter()
            .collect();
        sent.sort_unstable();
        let prefix = format!("r{round}e");
        let mut all = rig.effects.all().await;
        all.retain(|id| id.starts_with(&prefix));
        assert_eq!(all, sent);
    }
}

async fn second_identities_of_a_batch(rig: Rig) {
    // The second of them reports what the first does.
    assert_eq!(rig.send("a=x b=x c=y").await, own(200));
    assert_eq!(rig.news(), ["a", "c"]);
    assert_eq!(rig.send("d=x e=y").await, layers(200, "duplicate"));
    assert_eq!(rig.send("d e f=z").await, own(200));
    assert_eq!(rig.news(), ["f"]);
    // One elsewhere, under its second identity: the others run, and it afterwards.
    let (second, elsewhere) = ([DedupKey::new("test.second", "w").unwrap()], terms());
    rig.store.claim(&second, &elsewhere).await.unwrap();
    assert_eq!(rig.send("g=w h=v").await, layers(503, "in-flight"));
    assert_eq!(rig.news(), ["h"]);
    rig.store.release(&second, &elsewhere).await.unwrap();
    // What was granted of it may be given back in the background, and is in flight until it is.
    let handled = async {
        loop {
            let answer = rig.send("g=w h=v").await;
            if answer != layers(503, "in-flight") {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let answer = tokio::time::timeout(LATE, handled).await.expect("given back");
    // On arrival, the one that ran it may have been told that the other is in flight: that one had
    // the bad luck to be looked at while something was undone.
    let ran_before = rig.kind == Kind::Arrival && answer == layers(200, "duplicate");
    assert!(ran_before || answer == own(200), "{answer:?}");
    assert_eq!(rig.news(), ["g"]);
    assert_eq!(rig.effects.all().await, ids("a c f g h"));
    if rig.kind == Kind::Arrival {
        return;
    }
    // A poison event is free under both its identities, and what is done is done under both.
    assert_eq!(rig.send("i=s p=t:fail").await, own(500));
    assert_eq!(rig.send("j=s").await, layers(200, "duplicate"));
    assert_eq!(rig.send("q=t").await, own(200));
    assert_eq!(rig.send("p=t").await, layers(200, "duplicate"));
    assert_eq!(rig.effects.all().await, ids("a c f g h i q"));
}

async fn as_many_as_may_be_and_one_more(rig: Rig) {
    let batch = |count: usize| {
        let words: Vec<String> = (0..count).map(|n| format!("k{n}")).collect();
        format!("bulk! {}", words.join(" "))
    };
    assert_eq!(rig.send(&batch(4_097)).await, layers(400, "invalid-key"));
    assert_eq!((rig.store.count().await.unwrap(), rig.runs()), (0, 0));
    // Second identities count as well.
    assert_eq!(rig.send(&format!("{} one=two", batch(4_095))).await, layers(400, "invalid-key"));
    assert_eq!(rig.store.count().await.unwrap(), 0);
    assert_eq!(rig.send(&batch(4_096)).await, own(200));
    assert_eq!(rig.store.count().await.unwrap(), 4_096);
    assert_eq!(rig.effects.all().await.len(), 4_096);
    assert_eq!(rig.send(&batch(4_096)).await, layers(200, "duplicate"));
}

cases! {
    calls_memory_lease: memory_under(Lease) = [a_batch_is_one_call];
    calls_memory_arrival: memory_under(Arrival) = [a_batch_is_one_call];
    calls_sqlite_lease: sqlite_under(Lease) = [a_batch_is_one_call];
    calls_sqlite_arrival: sqlite_under(Arrival) = [a_batch_is_one_call];
    calls_postgres_lease: postgres_under(Lease) = [a_batch_is_one_call];
    calls_postgres_arrival: postgres_under(Arrival) = [a_batch_is_one_call];
}

fn hundred(name: &str) -> String {
    (0..100).map(|n| format!("{name}{n} ")).collect()
}

async fn a_batch_is_one_call(rig: Rig) {
    let (store, runs, log) = (Faulty::new(Arc::clone(&rig.store)), Runs::default(), Arc::default());
    let handler = move |request| apart(request, Arc::clone(&runs), Arc::clone(&log));
    let service = match rig.kind {
        Kind::Lease => service(DedupLayer::new(by_word(), Arc::clone(&store)), handler),
        _ => service(DedupLayer::on_arrival(by_word(), Arc::clone(&store)), handler),
    };
    assert_eq!(send_to(&service, &hundred("k")).await, own(200));
    let calls = [Op::Claim, Op::Complete, Op::Release].map(|op| store.calls(op));
    assert_eq!(calls, if rig.kind == Kind::Lease { [1, 1, 0] } else { [1, 0, 0] });
    assert_eq!(rig.store.count().await.unwrap(), 100);
}

/// A hundred new events cost as many messages to the server as one does.
#[tokio::test]
async fn a_batch_is_as_many_round_trips_as_one_event() {
    let (schema, _pools) = pg().await;
    let proxy = Proxy::start(&schema.url().parse().unwrap()).await;
    // One connection, which knows every statement after the first deliveries.
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
    let pool = pool.connect_lazy_with(proxy.options(schema.url().parse().unwrap()));
    let (adapter, runs, log) = (PostgresAdapter::new(pool), Runs::default(), Arc::default());
    let apart = {
        let runs = Arc::clone(&runs);
        move |request| apart(request, Arc::clone(&runs), Arc::clone(&log))
    };
    let within = move |request| within::<Postgres>(request, Arc::clone(&runs));
    // The claim and the completion; the record; the look, BEGIN, the claim, the effects in one
    // statement that is prepared first, the completion, COMMIT.
    for (service, messages) in [
        (service(DedupLayer::new(by_word(), adapter.clone()), apart.clone()), 2),
        (service(DedupLayer::on_arrival(by_word(), adapter.clone()), apart), 1),
        (service(DedupLayer::transactional(by_word(), adapter), within), 7),
    ] {
        assert_eq!(send_to(&service, &format!("bulk! warm{messages}")).await, own(200));
        for words in ["one".to_owned(), hundred("k")] {
            let words = words
                .replace('k', &format!("k{messages}-"))
                .replace("one", &format!("one{messages}"));
            // A statement that is planned anew is prepared first, now and then.
            let mut counted = Vec::new();
            for again in 0..3 {
                proxy.set(usize::MAX, Cut::Lost);
                let words = words.replace('-', &format!("-{again}-"));
                let words = words.replace("one", &format!("one{again}-"));
                assert_eq!(send_to(&service, &format!("bulk! {words}")).await, own(200));
                counted.push(proxy.messages());
            }
            assert_eq!(counted.iter().min(), Some(&messages), "{words}: {counted:?}");
        }
    }
}
