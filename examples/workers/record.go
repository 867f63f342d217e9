package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/seed-4c80c132/coord"
)

// record is the file to which one worker appends what it works on. It needs no
// sync: what write has handed to the system outlives the process.
type record struct{ *os.File }

// entry is a line of a record.
type entry struct {
	What      string        `json:"what"` // "start", "extend" or "stop"
	Partition int           `json:"partition"`
	Epoch     int64         `json:"epoch"`
	At        time.Duration `json:"at"`    // when it was written, by the shared clock
	Until     time.Duration `json:"until"` // the claim lasts until then, if nothing follows
}

func createRecord(name string) (*record, error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create the worker's record: %w", err)
	}
	return &record{file}, nil
}

// write appends an entry. It must have returned before any work is done that the
// entry allows. A worker that can't write its record ends: its work would prove
// nothing.
func (r *record) write(what string, lease coord.Lease, until time.Duration) {
	line, err := json.Marshal(entry{what, lease.Partition, lease.Epoch, sharedNow(), until})
	if err == nil {
		_, err = r.Write(append(line, '\n'))
	}
	if err != nil {
		log.Fatalf("write the worker's record: %v", err)
	}
}

// readRecord returns the claims in a worker's record. A last line without its end is
// passed over: the worker was killed as it wrote it, before it worked under it.
func readRecord(worker, name string) ([]claim, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", worker, err)
	}
	claims, err := parseRecord(worker, data)
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", worker, err)
	}
	return claims, nil
}

func parseRecord(worker string, data []byte) ([]claim, error) {
	var claims []claim
	current := map[int]int{} // index of the claim that has not ended, by partition
	for line := range bytes.Lines(data) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
		i, open := current[e.Partition]
		switch {
		case e.What == "start" && !open:
			current[e.Partition] = len(claims)
			claims = append(claims, claim{Worker: worker, Partition: e.Partition, Epoch: e.Epoch, From: e.At, To: e.Until})
		case e.What == "extend" && open && claims[i].Epoch == e.Epoch:
			claims[i].To = e.Until
		case e.What == "stop" && open && claims[i].Epoch == e.Epoch:
			claims[i].To, claims[i].Ended = e.Until, true
			delete(current, e.Partition)
		default:
			return nil, fmt.Errorf("line %q does not follow from those before it", line)
		}
	}
	return claims, nil
}
