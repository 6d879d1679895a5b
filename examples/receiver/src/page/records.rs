//! The log records of the layer, as the page shows them: an example of a `tracing` layer that reads
//! the records of [`tower_dedup::observe`].

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// How many records of each kind are held.
const HELD: usize = 50;

/// The last records, and the numbers of deliveries since the start. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Records(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The numbers of deliveries by outcome.
    pub(crate) outcomes: BTreeMap<String, u64>,
    /// The last records `delivery`, the newest first.
    pub(crate) deliveries: VecDeque<Record>,
    /// The last other records, the newest first.
    pub(crate) others: VecDeque<Record>,
}

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) at: SystemTime,
    pub(crate) level: Level,
    pub(crate) message: String,
    fields: BTreeMap<&'static str, String>,
}

impl Record {
    /// Returns the text of a field; empty without the field.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }

    /// Returns the fields but the event: sender, path, reason and others.
    pub(crate) fn others(&self) -> impl Iterator<Item = (&str, &str)> {
        let fields = self.fields.iter().map(|(name, value)| (*name, value.as_str()));
        fields.filter(|(name, _)| !["namespace", "id"].contains(name))
    }
}

impl Records {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Collects the records that the subscriber's filter lets through.
impl<S: Subscriber> Layer<S> for Records {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !["tower_dedup", "tower_dedup_inbox"].contains(&event.metadata().target()) {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Fields { message, fields } = fields;
        let level = *event.metadata().level();
        let record = Record { at: SystemTime::now(), level, message, fields };
        let mut held = self.lock();
        let records = if record.message == "delivery" {
            *held.outcomes.entry(record.field("outcome").to_owned()).or_default() += 1;
            &mut held.deliveries
        } else {
            &mut held.others
        };
        records.truncate(HELD - 1);
        records.push_front(record);
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    fields: BTreeMap<&'static str, String>,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }

    /// All other types, and the message.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.fields.insert(field.name(), format!("{value:?}"));
        }
    }
}
