//! [`World`]: who sends what, and what may go wrong. [`Rule`]: each rule can be left out.

use super::state::Mask;

/// A rule of the inbox. `LEFT_OUT` in `main.rs` names a world that has a violation without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    // *Stored* and the row.
    /// *Stored* leaves only after the row's COMMIT has replied.
    CommitFirst,
    /// The COMMIT of an insertion waits for the disk, whatever the role's setting is.
    Durable,
    /// So does every other statement before *stored*: a redelivery, `answer_within`, a failure.
    DurableAnswer,
    /// Every such statement sets `answered`.
    Answered,
    /// `answered` is read by the statement that ends a run, not when the row is taken.
    AnsweredIsRead,
    /// A delivery that meets another one of its key in its batch sets `answered`.
    AnsweredInBatch,
    /// A delivery whose row exists makes a waiting or parked row due.
    Wakes,
    /// A row is deleted only in the version in which it was taken. Each *stored* raises the version, but that of a run
    /// which reschedules the row.
    Versions,
    /// A run that raises the version itself adds 1 to the version that it took. It does not take the version that the
    /// statement returns.
    OwnVersion,
    /// After a failure, *stored* leaves only if the write found the row.
    StillThere,
    /// If the table fails, the delivery goes to the ledger without a row, and the answer is the sender's.
    Passes,

    // The row's key.
    /// The key covers all events of the request.
    WholeKey,
    /// The key covers the body. Another body under the same id is another row, and the ledger decides.
    BodyInKey,
    /// The key covers the service, and a process takes the rows of its own service only.
    Service,

    // The end of a row.
    /// The ledger decides who runs. A turn alone does not.
    Ledger,
    /// Only the ledger's word deletes a row. A 2xx of the handler does not.
    LedgersWord,
    /// In flight is no end.
    InFlightWaits,
    /// In flight and unavailable count no attempt.
    NoAttempt,
    /// A layer in another mode says nothing: its end deletes no row that was answered *stored*, and no redelivery's.
    Undecided,
    /// A refused mismatch parks a row that was answered *stored*.
    MismatchParks,
    /// A run ends the row that it took, by `seq`. It does not end a newer row of the same key.
    BySeq,
    /// A run reschedules or parks only a row whose turn it has.
    ByTurn,

    // The loop.
    /// A process takes rows of namespaces that it has a layer for.
    OwnRows,
    /// A process takes rows only while every layer of their namespace has the mode `Enforce`.
    AllEnforce,
    /// A redelivery under another mode calls nothing.
    CallsNothing,
    /// A redelivery whose keys are not the row's calls nothing.
    SameKeys,
    /// Without a report of `around`, a redelivery is misrouted, whatever its status is.
    Report,
    /// A misrouted row is parked in the end.
    GivesUp,
    /// A turn lapses, so others take the rows of a process that died.
    TurnLapses,
    /// A process renews the turns of the runs that it knows, not all turns that name it.
    RenewsRuns,
    /// A death counts as an attempt.
    Deaths,

    // Time and people.
    /// A row is parked as expired before its key expires.
    ExpiresFirst,
    /// The retention is longer than the sender's floor and the life of a row together.
    Retention,
    /// A redelivery renews the life of the row.
    Renews,
    /// The purge deletes a row in the version that it has read.
    PurgeVersion,
    /// `forget` leaves the row.
    ForgetSpares,
}

impl Rule {
    pub(crate) const LAST: Self = Self::ForgetSpares;
}

/// A request, which its sender sends once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delivery {
    pub(crate) events: Mask,
    pub(crate) process: usize,
    pub(crate) body: u8,
}

pub(crate) const fn delivery(events: Mask, process: usize, body: u8) -> Delivery {
    Delivery { events, process, body }
}

/// What may happen, and need not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A process is killed.
    Kill,
    /// A lease or a turn lapses under a run that goes on.
    Lapse,
    /// A handler fails, or answers 2xx without a COMMIT.
    Fail,
    /// A handler answers 422.
    Refusal,
    /// A call of the inbox's table or of the key store fails, or its reply is lost.
    Call,
    /// The inbox's database crashes.
    Crash,
    /// An operator forgets a key.
    Forget,
    /// An operator retries a parked row.
    Retry,
    /// A redelivery loses its mark on the way.
    LostMark,
    /// A key expires.
    Expiry,
    /// A row gets older than a row may.
    Age,
    /// A layer is switched to another mode.
    Switch,
    /// A process gets the new version.
    Deploy,
}

/// How often each fault may happen.
pub(crate) type Left = [u8; Fault::Deploy as usize + 1];

/// Returns `base` with other numbers for some faults.
pub(crate) const fn left(mut base: Left, numbers: &[(Fault, u8)]) -> Left {
    let mut index = 0;
    while index < numbers.len() {
        base[numbers[index].0 as usize] = numbers[index].1;
        index += 1;
    }
    base
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answers {
    AtTheEnd,
    /// `answer_within` may pass at any moment.
    Within,
    /// `later`: a delivery is only stored.
    First,
}

/// What is special about a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum With {
    Nothing,
    /// Process 1 has no layer of the namespace.
    OneRoute,
    /// Process 0 has one service, process 1 another, and their ids are equal.
    TwoServices,
    /// Each process has a layer for event 0, and another layer of the same namespace for event 1.
    TwoLayers,
    /// Body 0 was handled under another id: by its content identity it is a duplicate.
    OldBody,
    /// The layer refuses another body under a complete id.
    Refusal,
    /// The handler of event 0 kills its process.
    DeadlyEvent,
}

/// What the new version of the application does with a redelivery of a row that the old version stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deploy {
    /// It reads other keys.
    OtherKeys,
    /// It answers 404.
    NoRoute,
    /// It answers 200, and runs nothing.
    Fallback,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Shadow,
    Off,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct World {
    pub(crate) name: &'static str,
    pub(crate) deliveries: &'static [Delivery],
    /// A delivery is sent after the one before it was acknowledged.
    pub(crate) one_by_one: bool,
    pub(crate) answers: Answers,
    pub(crate) with: With,
    /// The mode of a layer that is switched.
    pub(crate) mode: Mode,
    pub(crate) deploy: Deploy,
    pub(crate) left: Left,
}

/// Attempts before a row is parked.
pub(crate) const ATTEMPTS: u8 = 2;

impl World {
    pub(crate) const fn one_by_one(self) -> Self {
        Self { one_by_one: true, ..self }
    }

    pub(crate) const fn within(self) -> Self {
        Self { answers: Answers::Within, ..self }
    }

    pub(crate) const fn first(self) -> Self {
        Self { answers: Answers::First, ..self }
    }

    pub(crate) const fn shadow(self) -> Self {
        Self { mode: Mode::Shadow, ..self }
    }

    pub(crate) const fn with(self, with: With) -> Self {
        Self { with, ..self }
    }

    pub(crate) const fn deploy(self, deploy: Deploy) -> Self {
        Self { deploy, ..self }
    }
}
