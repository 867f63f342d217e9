package integration

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

// BenchmarkLeaseWorkers is how many acquisitions and releases of leases one Coord does in a
// second, each worker on partitions of its own.
func BenchmarkLeaseWorkers(b *testing.B) {
	for _, e := range chosen() {
		for _, workers := range []int{1, 8} {
			b.Run(fmt.Sprintf("%s/workers=%d", e.name, workers), func(b *testing.B) {
				e := newEnv(b, e, nil)
				db := e.open(b)
				db.SetMaxIdleConns(workers + 1)
				s := newCoord(b, db, e.dialect, e.config()).Leases()
				cycle := func(partition int) {
					if _, err := s.Acquire(b.Context(), "jobs", partition, "a", time.Minute); err != nil {
						b.Error(err)
					}
					if ok, err := s.Release(b.Context(), "jobs", partition, "a"); !ok || err != nil {
						b.Error(ok, err)
					}
				}
				for p := range workers {
					cycle(p)
				}
				b.ResetTimer()
				var wg sync.WaitGroup
				for p := range workers {
					wg.Go(func() {
						for i := p; i < b.N; i += workers {
							cycle(p)
						}
					})
				}
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cycles/s")
			})
		}
	}
}
