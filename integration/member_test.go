package integration

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

func TestMembers(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Members()
		beat := func(node, address string, groups ...string) coord.Member {
			t.Helper()
			m, err := s.Heartbeat(t.Context(), "web", node, address, time.Hour, groups)
			if err != nil {
				t.Fatalf("Heartbeat(%s) = %v", node, err)
			}
			return m
		}
		list := func(want ...coord.Member) {
			t.Helper()
			got, err := s.List(t.Context(), "web")
			if err != nil || len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
				t.Fatalf("List = %+v, %v, want %+v", got, err, want)
			}
		}
		list()
		before := e.now(t)
		b := beat("b", "10.0.0.2:80", "z", "y", "z")
		if !slices.Equal(b.Groups, []string{"y", "z"}) || b.Service != "web" || b.Node != "b" || b.Address != "10.0.0.2:80" {
			t.Errorf("Heartbeat = %+v, want groups sorted and once each", b)
		}
		if b.ExpiresAt.Before(before.Add(time.Hour)) || b.ExpiresAt.After(e.now(t).Add(time.Hour+e.tick())) {
			t.Errorf("ExpiresAt = %v, want an hour after %v", b.ExpiresAt, before)
		}
		a := beat("a", "")
		if a.Groups == nil || len(a.Groups) != 0 {
			t.Errorf("Groups = %#v, want empty and not nil", a.Groups)
		}
		upper := beat("B", "")
		if _, err := s.Heartbeat(t.Context(), "other", "c", "", time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		list(upper, a, b)
		b = beat("b", "", "x")
		list(upper, a, b)
		for range 2 {
			if err := s.Leave(t.Context(), "web", "b"); err != nil {
				t.Fatalf("Leave = %v", err)
			}
		}
		list(upper, a)
	})
}

func TestMemberExpires(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		s := c.Members()
		m, err := s.Heartbeat(t.Context(), "web", "a", "", 20*time.Millisecond, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Heartbeat(t.Context(), "web", "b", "", time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		e.pass(t, m.ExpiresAt)
		members, err := s.List(t.Context(), "web")
		if err != nil || len(members) != 1 || members[0].Node != "b" {
			t.Fatalf("List at a's expiry = %+v, %v, want b alone", members, err)
		}
		for _, c2 := range []struct {
			age  time.Duration
			want int64
		}{{time.Hour, 0}, {0, 1}, {0, 0}} {
			if n, err := c.Purge(t.Context(), c2.age); n != c2.want || err != nil {
				t.Fatalf("Purge(%v) = %d, %v, want %d", c2.age, n, err, c2.want)
			}
		}
		if again, err := s.Heartbeat(t.Context(), "web", "a", "", time.Hour, nil); err != nil || again.Node != "a" {
			t.Fatalf("Heartbeat after expiry = %+v, %v", again, err)
		}
	})
}

// TestMemberGroups: what goes in comes out, byte for byte.
func TestMemberGroups(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Members()
		groups := []string{`"`, `,`, `{}`, `{"a",b}`, `\`, `\"`, `NULL`, `null`, "😀", "\u2028<&>", "a\nb\tc", "\x01", "é", "e\u0301", "Ä", "a", "A", " "}
		for i := range 1000 {
			groups = append(groups, fmt.Sprint("g", i))
		}
		if _, err := s.Heartbeat(t.Context(), "web", "a", `a"b'c\d`, time.Hour, groups); err != nil {
			t.Fatal(err)
		}
		members, err := s.List(t.Context(), "web")
		if err != nil || len(members) != 1 {
			t.Fatalf("List = %v, %v", members, err)
		}
		slices.Sort(groups)
		if !slices.Equal(members[0].Groups, groups) || members[0].Address != `a"b'c\d` {
			t.Errorf("Groups = %q, want %q", members[0].Groups, groups)
		}
	})
}

// TestMembersAtOnce: heartbeats of many nodes, each through several pools.
func TestMembersAtOnce(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		var stores []*coord.MemberStore
		for range 4 {
			stores = append(stores, newCoord(t, e.open(t), e.dialect, e.config()).Members())
		}
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				for range 10 {
					if _, err := stores[i%4].Heartbeat(t.Context(), "web", fmt.Sprint("node-", i/4), "", time.Hour, nil); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if members, err := stores[0].List(t.Context(), "web"); len(members) != 4 || err != nil {
			t.Errorf("List = %v, %v, want 4 nodes", members, err)
		}
	})
}
