//! What the queue counts, step by step: waiting calls, lanes and late batches.

use tokio::sync::oneshot;

use super::queue::{Queue, QueueReply};
use super::{Item, MAX_BATCH_KEYS};

type Reply = oneshot::Receiver<QueueReply<Item>>;

/// Queues a call with this number.
fn push(queue: &mut Queue<Item>, number: usize) -> Reply {
    push_of_kind(queue, number, 1)
}

fn push_of_kind(queue: &mut Queue<Item>, number: usize, kind: u8) -> Reply {
    let (reply, receiver) = oneshot::channel();
    queue.push(Item { number, kind }, reply);
    receiver
}

/// Returns the calls of the next batch.
fn take(queue: &mut Queue<Item>) -> Vec<usize> {
    queue.take(MAX_BATCH_KEYS).into_iter().map(|waiting| waiting.item.number).collect()
}

#[test]
fn abandoned_call_gives_its_room_back_unless_it_was_sent() {
    let mut queue = Queue::default();
    // Their tickets count from 0.
    let _replies = [1, 4, 3, 5, 7].map(|key| push(&mut queue, key));
    assert_eq!(queue.len(), 5);
    queue.abandon(0);
    assert_eq!(queue.len(), 4);
    for ticket in [0, 9] {
        queue.abandon(ticket);
        assert_eq!(queue.len(), 4, "no call {ticket} waits");
    }
    queue.abandon(2);
    assert_eq!(queue.len(), 3, "a call between others");
    assert_eq!((take(&mut queue), queue.len()), (vec![4, 5, 7], 0));
    let _reply = push(&mut queue, 8);
    queue.abandon(3);
    assert_eq!(queue.len(), 1, "the call was sent");
    assert_eq!((take(&mut queue), queue.len()), (vec![8], 0));
}

#[test]
fn batch_holds_calls_that_join_and_is_full_with_its_last_call() {
    let mut queue = Queue::default();
    let calls: Vec<usize> = (0..2 * MAX_BATCH_KEYS + 1).collect();
    let _replies: Vec<_> = calls.iter().map(|call| push(&mut queue, *call)).collect();
    for batch in calls.chunks(MAX_BATCH_KEYS) {
        assert_eq!(take(&mut queue), batch);
    }
    let _replies = [1, 2, 1].map(|kind| push_of_kind(&mut queue, kind.into(), kind));
    assert_eq!((take(&mut queue), take(&mut queue)), (vec![1, 1], vec![2]));
}

#[test]
fn a_lane_passes_over_four_batches_of_calls_that_cannot_join() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![0, 9]), (4 * MAX_BATCH_KEYS + 1, vec![0])] {
        let mut queue = Queue::default();
        let _first = push_of_kind(&mut queue, 0, 0);
        let _others: Vec<_> = (1..=skipped).map(|_| push_of_kind(&mut queue, 5, 1)).collect();
        let _last = push_of_kind(&mut queue, 9, 0);
        assert_eq!(take(&mut queue), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queue)[0], 5);
    }
}

#[test]
fn only_the_last_lane_gives_the_waiting_calls_back() {
    let mut queue = Queue::default();
    let _sent = push(&mut queue, 5);
    assert!(queue.opens_lane(2, 1));
    assert_eq!(take(&mut queue), [5]);
    let _replies = [7, 1].map(|key| push(&mut queue, key));
    assert!(queue.opens_lane(2, 1));
    queue.finish_batch(false);
    assert_eq!((queue.close_lane().len(), queue.len()), (0, 2));
    assert!(queue.has_lanes());
    assert_eq!((queue.close_lane().len(), queue.len()), (2, 0));
    assert!(!queue.has_lanes());
}

#[test]
fn a_second_lane_is_worth_some_keys_and_a_late_batch_one_more_lane() {
    let mut queue = Queue::default();
    let _first = [1, 2].map(|key| push(&mut queue, key));
    assert!(queue.opens_lane(2, 3), "the first lane needs no number of keys");
    assert!(!queue.opens_lane(2, 2), "the first lane takes them");
    assert_eq!(take(&mut queue), [1, 2]);
    let _more = [1, 2].map(|key| push(&mut queue, key));
    assert!(!queue.opens_lane(2, 3));
    assert!(queue.opens_lane(2, 2));
    assert_eq!(take(&mut queue), [1, 2]);
    let _last = push(&mut queue, 1);
    assert!(!queue.opens_lane(2, 1), "two lanes at most");
    queue.abandon(4);
    // While a batch is late, a call that waits opens one more lane.
    queue.add_late();
    assert!(!queue.opens_lane(2, 0), "nothing waits");
    let _second = push(&mut queue, 3);
    assert!(queue.opens_lane(2, 9));
    assert!(!queue.opens_lane(2, 9));
    assert!(!queue.has_surplus(2));
    queue.finish_batch(true);
    // The lane that was started beside the late batch ends, and leaves the call to the others.
    assert!(queue.has_surplus(2));
    assert_eq!(queue.close_lane().len(), 0);
    assert!(!queue.has_surplus(2));
    assert_eq!(take(&mut queue), [3]);
}

#[test]
fn as_many_late_batches_as_lanes_open_a_lane_each() {
    let mut queue = Queue::default();
    for _ in 0..3 {
        queue.add_late();
    }
    let opens_and_sends = |_: &u8| {
        let _reply = push(&mut queue, 1);
        let opens = queue.opens_lane(2, 1);
        take(&mut queue);
        opens
    };
    assert_eq!((0..9).filter(opens_and_sends).count(), 4);
}
