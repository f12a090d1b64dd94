//! What the owner of a process does for several clients: guests, acknowledgements, sizes, the screen.

use codex_exec_server_protocol::Base64Bytes;
use codex_exec_server_protocol::process::{Fit, ScreenResponse, TerminalSize};

use super::super::event::{EventKind, EventSink, ProcessEvent};
use super::super::guests::ClientId;
use super::super::handle::{NoTerminal, Reader};
use super::super::pty;
use super::{Actor, Subscriber};

impl Actor {
    pub(super) fn join(&mut self, client: ClientId, sink: Box<dyn EventSink>, paces: bool) {
        // What is there already has to be read; the newest chunk must not grow after that.
        self.seen = self.next_seq - 1;
        if paces && matches!(self.subscriber, Subscriber::Detached) && !self.guests.any_paces() {
            self.expect_backlog();
        }
        self.guests.join(client, sink, paces);
        if matches!(self.subscriber, Subscriber::Expected) {
            // A guest started it, and gets what its first subscriber would have got.
            for event in std::mem::take(&mut self.undelivered) {
                self.guests.publish(&event, usize::MAX);
            }
            self.undelivered_bytes = 0;
            self.subscriber = Subscriber::Detached;
        }
    }

    pub(super) fn leave(&mut self, clients: &[ClientId]) {
        let watched = self.guests.any_paces();
        for client in clients {
            self.sizes.remove(*client);
            self.guests.leave(*client);
        }
        self.apply_size();
        self.pin_if_unwatched(watched);
    }

    /// Without a client that paces the process, sent events may be lost: all retained output stays until such a
    /// client reads it.
    pub(super) fn pin_if_unwatched(&mut self, watched: bool) {
        if watched && !self.guests.any_paces() && matches!(self.subscriber, Subscriber::Detached) {
            self.parts.retention.pin_all();
        }
    }

    /// Events went to guests. Without a subscriber, those that do so pace the process.
    pub(super) fn guests_moved(&mut self) {
        if matches!(self.subscriber, Subscriber::Detached) {
            if self.backlog.is_none() && self.guests.any_paces() {
                self.parts.retention.sent(self.guests.delivered());
            }
            self.pin_if_unwatched(true);
        }
    }

    /// Whether the reads of this client acknowledge output.
    pub(super) fn acknowledges(&self, reader: Reader) -> bool {
        match reader {
            Reader::Subscriber => true,
            Reader::Guest(client) => {
                matches!(self.subscriber, Subscriber::Detached) && self.guests.paces(client)
            }
        }
    }

    /// Sets the size of a client's window.
    pub(super) fn resize(
        &mut self,
        client: ClientId,
        size: TerminalSize,
        fit: Fit,
    ) -> Result<TerminalSize, NoTerminal> {
        if self.parts.terminal.is_none() {
            return Err(NoTerminal);
        }
        self.sizes.set(client, size, fit);
        self.apply_size();
        self.parts.screen.as_ref().map(|screen| screen.size()).ok_or(NoTerminal)
    }

    /// Gives the terminal the size that its clients agree on.
    pub(super) fn apply_size(&mut self) {
        let (Some(master), Some(screen), Some(size)) =
            (&self.parts.terminal, &mut self.parts.screen, self.sizes.effective())
        else {
            return;
        };
        if size == screen.size() || pty::resize(master, size).is_err() {
            return;
        }
        screen.resized(size);
        if let Some(tap) = &mut self.parts.tap {
            tap.resized(size);
        }
        let event = ProcessEvent {
            process_id: self.parts.process_id.clone(),
            seq: self.next_seq - 1,
            kind: EventKind::Resized { size, resizes: screen.resizes() },
        };
        self.guests.publish(&event, self.config.unsent_bytes);
        if !matches!(self.subscriber, Subscriber::Detached) {
            self.undelivered.push_back(event);
        }
        // Output before and after it is not one chunk.
        self.seen = self.next_seq - 1;
    }

    /// A client has received everything up to `seq`.
    pub(super) fn acknowledge(&mut self, seq: u64) {
        if matches!(self.subscriber, Subscriber::Detached) && !self.guests.any_paces() {
            return;
        }
        self.parts.retention.release(seq);
        if self.backlog.as_ref().is_some_and(|backlog| seq + 1 >= backlog.before) {
            self.backlog = None;
            self.parts.retention.sent(self.arrived);
        }
    }

    /// What repaints the terminal.
    pub(super) fn screen(&mut self) -> Result<ScreenResponse, NoTerminal> {
        let screen = self.parts.screen.as_mut().ok_or(NoTerminal)?;
        let seq = self.next_seq - 1;
        // It shows the newest chunk, which must not grow any more.
        self.seen = seq;
        let repaint = Base64Bytes(screen.repaint().into());
        Ok(ScreenResponse { seq, resizes: screen.resizes(), size: screen.size(), repaint })
    }
}
