//! Multi-event deliveries on every adapter and under every ledger. New events run, and are completed or
//! released together. If another claim holds an event, the answer is 503.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};

use crate::support::multi_event::{Fixture, Kind, LATE, cases, ids, layers, own, send_to};
use crate::support::{claim_all, dedup_key, rows, terms};

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
    new_events_run_and_no_others,
    handler_that_fails_half_way_releases_the_whole_delivery,
    list_whose_process_died_runs_whole_as_a_takeover,
    event_in_flight_under_another_claim_is_503_after_the_new_ones,
    overlapping_deliveries_race_and_every_event_takes_effect_once,
    second_identity_of_any_event_makes_it_a_duplicate,
    maximum_of_events_runs_and_one_more_is_400,
);

async fn new_events_run_and_no_others(fixture: Fixture) {
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!(fixture.news(), ["a", "b", "c"]);
    assert_eq!(fixture.send("c d b d e").await, own(200));
    assert_eq!(fixture.news(), ["d", "e"]);
    let delivery = fixture.last();
    assert!(delivery.needs_run(&dedup_key("d")) && !delivery.needs_run(&dedup_key("c")));
    assert_eq!(delivery.key(), &dedup_key("d"));
    assert_eq!(fixture.send("e a").await, layers(200, "duplicate"));
    assert_eq!(fixture.send("  ").await, layers(400, "invalid-key"));
    assert_eq!((fixture.effects.all().await, fixture.runs()), (ids("a b c d e"), 2));
    // Many events, which the adapter looks up in another way.
    let many: Vec<String> = (0..40).map(|n| format!("n{n:02}")).collect();
    assert_eq!(fixture.send(&format!("e {}", many.join(" "))).await, own(200));
    assert_eq!(fixture.news(), many);
}

/// The handler goes on after the poison event and fails at its end, or it ends there: by its status, its error, its
/// panic, a drop, or an aborted transaction.
async fn handler_that_fails_half_way_releases_the_whole_delivery(fixture: Fixture) {
    let goes_on = [("fail", 500), ("sql", 500)];
    let ends = [("500", 500), ("error", 1), ("panic", 0), ("hang", 504), ("abort", 500)];
    for (n, (way, status)) in goes_on.into_iter().chain(ends).enumerate() {
        let batch = |way: &str| {
            format!("a{n} p{n}:{way} c{n} {}", if way == "hang" { "impatient!" } else { "" })
        };
        assert_eq!(fixture.send(&batch(way)).await, own(status), "{way}");
        let is_complete = fixture.is_complete(&format!("a{n}")).await;
        assert_eq!(is_complete, fixture.kind == Kind::Arrival, "{way}");
        let retried = fixture.send(&batch("")).await;
        if fixture.kind == Kind::Arrival {
            assert_eq!(retried, layers(200, "duplicate"));
            assert!(fixture.effects.all().await.is_empty(), "lost, as documented");
            continue;
        }
        assert_eq!(retried, own(200), "{way}");
        assert_eq!(fixture.news(), ["a", "p", "c"].map(|id| format!("{id}{n}")));
        assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (2, false));
        assert_eq!(fixture.send(&batch("")).await, layers(200, "duplicate"));
        assert_eq!(fixture.effects.all().await.len(), 3 * (n + 1), "{way}");
    }
    let all = fixture.effects.all().await;
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
}

async fn list_whose_process_died_runs_whole_as_a_takeover(fixture: Fixture) {
    let dead = CallTerms::on_completion(Token::random(), terms().retention(), Duration::ZERO);
    claim_all(&*fixture.store, &["a", "b"].map(dedup_key), &dead).await.unwrap();
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!((fixture.news(), fixture.last().is_takeover()), (ids("a b c"), true));
    assert_eq!(fixture.send("a b c").await, layers(200, "duplicate"));
}

async fn event_in_flight_under_another_claim_is_503_after_the_new_ones(fixture: Fixture) {
    let (one, two) = (terms(), terms());
    fixture.store.claim(&dedup_key("b"), &one).await.unwrap();
    fixture.store.claim(&dedup_key("d"), &two).await.unwrap();
    assert_eq!(fixture.send("a b c").await, layers(503, "in-flight"));
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a c"), ids("a c")));
    assert!(fixture.is_complete("a").await && fixture.is_complete("c").await);
    // No event is new, so the handler does not run.
    assert_eq!(fixture.send("a b c d").await, layers(503, "in-flight"));
    assert_eq!(fixture.runs(), 1);
    // The other process completes one event and releases the other one.
    fixture.store.complete(&dedup_key("b"), &one).await.unwrap();
    fixture.store.release(&dedup_key("d"), &two).await.unwrap();
    assert_eq!(fixture.send("a b c").await, layers(200, "duplicate"));
    assert_eq!(fixture.send("a b c d").await, own(200));
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("d"), ids("a c d")));
}

/// Tasks on both processes send overlapping deliveries in every order; some handlers fail at an
/// event.
async fn overlapping_deliveries_race_and_every_event_takes_effect_once(fixture: Fixture) {
    const EVENTS: usize = 24;
    for round in 0..4 {
        let deliver = |task: usize| {
            let mut left: Vec<usize> = (0..EVENTS).collect();
            let batch: Vec<String> = (0..8)
                .map(|_| left.swap_remove(rand::random_range(0..left.len())))
                .map(|event| format!("r{round}e{event}"))
                .collect();
            let fails = fixture.kind != Kind::Arrival;
            let service = fixture.services[task % 2].clone();
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
        let mut all = fixture.effects.all().await;
        all.retain(|id| id.starts_with(&prefix));
        assert_eq!(all, sent);
    }
}

async fn second_identity_of_any_event_makes_it_a_duplicate(fixture: Fixture) {
    if fixture.kind == Kind::Arrival {
        assert_eq!(fixture.send("a=x b").await, layers(503, "unavailable"));
        assert_eq!((rows(&fixture.store).await, fixture.runs()), (0, 0));
        return;
    }
    // The second of two events has the same second identity as the first one.
    assert_eq!(fixture.send("a=x b=x c=y").await, own(200));
    assert_eq!(fixture.news(), ["a", "c"]);
    assert_eq!(fixture.send("d=x e=y").await, layers(200, "duplicate"));
    assert_eq!(fixture.state("d").await, None, "the twin's own id was not touched");
    assert_eq!(fixture.send("f=z").await, own(200));
    assert_eq!(fixture.news(), ["f"]);
    // Another claim holds the second identity of one event. The other events run now, and that
    // event runs after the release.
    let (second, other) = (DedupKey::new("test.second", "w").unwrap(), terms());
    fixture.store.claim(&second, &other).await.unwrap();
    assert_eq!(fixture.send("g=w h=v").await, layers(503, "in-flight"));
    assert_eq!(fixture.news(), ["h"]);
    fixture.store.release(&second, &other).await.unwrap();
    // The layer may release its own claim in the background. Until then the event is in flight.
    let handled = async {
        loop {
            let answer = fixture.send("g=w h=v").await;
            if answer != layers(503, "in-flight") {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let answer = tokio::time::timeout(LATE, handled).await.expect("the claim is released");
    assert_eq!(answer, own(200));
    assert_eq!(fixture.news(), ["g"]);
    assert_eq!(fixture.effects.all().await, ids("a c f g h"));
    // The events of a delivery that fails are free under both identities.
    assert_eq!(fixture.send("i=s p=t:fail").await, own(500));
    for (free, twin) in [("j=s", "i=s"), ("q=t", "p=t")] {
        assert_eq!(fixture.send(free).await, own(200));
        assert_eq!(fixture.send(twin).await, layers(200, "duplicate"));
    }
    assert_eq!(fixture.effects.all().await, ids("a c f g h j q"));
}

async fn maximum_of_events_runs_and_one_more_is_400(fixture: Fixture) {
    let batch = |count: usize| {
        let words: Vec<String> = (0..count).map(|n| format!("k{n}")).collect();
        format!("bulk! {}", words.join(" "))
    };
    assert_eq!(fixture.send(&batch(4_097)).await, layers(400, "invalid-key"));
    assert_eq!((rows(&fixture.store).await, fixture.runs()), (0, 0));
    // Second identities count as keys as well.
    assert_eq!(
        fixture.send(&format!("{} one=two", batch(4_095))).await,
        layers(400, "invalid-key")
    );
    assert_eq!(rows(&fixture.store).await, 0);
    assert_eq!(fixture.send(&batch(4_096)).await, own(200));
    assert_eq!(rows(&fixture.store).await, 4_096);
    assert_eq!(fixture.effects.all().await.len(), 4_096);
    assert_eq!(fixture.send(&batch(4_096)).await, layers(200, "duplicate"));
}
