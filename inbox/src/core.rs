//! [`Core`]: what the layers and the loop of an inbox share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tower_dedup::{DedupHandle, Mode};

use crate::ender::Ender;
use crate::observe::{self, locked};
use crate::row::NewRow;
use crate::settings::{InboxError, Settings};
use crate::table::{Stored, Table};
use crate::writer::Writer;

/// Makes the table of a service with these settings.
pub(crate) type MakeTable = dyn Fn(&str, &Settings) -> Arc<dyn Table> + Send + Sync;

/// What the layers and the loop of an inbox share.
pub(crate) struct Core {
    pub(crate) table: Arc<dyn Table>,
    pub(crate) service: String,
    pub(crate) settings: Settings,
    /// The namespaces that this process can run, and a handle of each of their layers.
    layers: Mutex<Vec<(String, DedupHandle)>>,
    writer: Writer,
    pub(crate) ender: Ender,
    /// The deliveries of senders.
    pub(crate) tasks: TaskTracker,
    /// Wakes the loop.
    pub(crate) wake: Notify,
    /// The table has as many rows or bytes as it may.
    pub(crate) is_full: AtomicBool,
    /// When a loop was last alive; before the first one, when the first row was stored.
    last_loop: Mutex<Option<Instant>>,
}

impl Core {
    pub(crate) fn new(make: &MakeTable, service: &str, settings: Settings) -> Self {
        let table = make(service, &settings);
        let tasks = TaskTracker::new();
        tasks.close();
        Self {
            writer: Writer::new(&table),
            ender: Ender::new(&table, settings.turn),
            table,
            service: service.to_owned(),
            settings,
            layers: Mutex::default(),
            tasks,
            wake: Notify::new(),
            is_full: AtomicBool::new(false),
            last_loop: Mutex::default(),
        }
    }

    /// Returns an error if a setting is invalid.
    pub(crate) fn check(&self) -> Result<(), InboxError> {
        self.settings.check(&self.service)
    }

    /// Returns what names this inbox in the process.
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Registers a layer of this process.
    pub(crate) fn register(&self, namespace: &str, handle: DedupHandle) {
        locked(&self.layers).push((namespace.to_owned(), handle));
    }

    /// Returns the namespaces whose rows this process may run: every layer of it enforces its
    /// verdicts.
    pub(crate) fn namespaces(&self) -> Vec<String> {
        let mut all = BTreeMap::new();
        for (namespace, handle) in locked(&self.layers).iter() {
            *all.entry(namespace.clone()).or_insert(true) &= handle.mode() == Mode::Enforce;
        }
        all.into_iter().filter_map(|(namespace, enforces)| enforces.then_some(namespace)).collect()
    }

    /// Stores a delivery. `None` if it is not stored: the reason is reported.
    pub(crate) async fn store(&self, row: NewRow) -> Option<Stored> {
        let namespace = row.namespace.clone();
        let stored = if self.is_full.load(Ordering::Relaxed) {
            Err(observe::NotStored::Full)
        } else {
            self.writer.store(row).await
        };
        match stored {
            Ok(stored) => {
                observe::stored(&namespace, stored == Stored::Known);
                self.look_for_a_loop();
                Some(stored)
            }
            Err(why) => {
                observe::not_stored(&namespace, &why);
                None
            }
        }
    }

    pub(crate) fn loop_is_alive(&self) {
        *locked(&self.last_loop) = Some(Instant::now());
    }

    /// Reports rows that nobody will deliver again.
    fn look_for_a_loop(&self) {
        let mut last = locked(&self.last_loop);
        match *last {
            None => *last = Some(Instant::now()),
            Some(at) if at.elapsed() > Duration::from_secs(60) => {
                observe::no_loop(&self.service);
                *last = Some(Instant::now());
            }
            Some(_) => {}
        }
    }
}
